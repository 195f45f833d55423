"""Absorbed MLA attention of tree nodes over cache and tree."""
