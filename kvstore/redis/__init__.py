"""The store and the cluster's state in Redis."""
