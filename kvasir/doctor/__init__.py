"""Whether a cluster's parts are there and fit together."""
