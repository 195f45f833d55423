"""The walk along a draft tree that the target's own tokens pick."""
