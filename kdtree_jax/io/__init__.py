"""Files in and out: checkpoints, bundles, results. Nothing here decodes."""
