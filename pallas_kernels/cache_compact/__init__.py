"""Commit of a tree's accepted rows into the latent cache."""
