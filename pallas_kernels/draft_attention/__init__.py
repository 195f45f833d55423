"""Grouped-query attention of a drafter's block over its context and itself."""
