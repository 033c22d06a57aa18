"""The store and the cluster state in Redis."""
