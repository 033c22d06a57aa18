"""Checks whether the parts of a cluster work and fit together."""
