"""Every fault of `benchmarks.faults`, injected into real processes. `stage` is where, `catalogue` what."""
