"""From runs to numbers, tables and pictures; NumPy only, no JAX."""
