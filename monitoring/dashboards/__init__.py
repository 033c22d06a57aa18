"""The Grafana dashboard, as data."""
