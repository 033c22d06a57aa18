"""An engine without a model, for tests, benchmarks and planning."""
