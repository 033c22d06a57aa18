"""Compares the models' grades with people's, for `kvasir evaluate`."""
