"""One frozen config a file; found by file name, imported on demand."""
