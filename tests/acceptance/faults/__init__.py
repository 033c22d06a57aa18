"""Every fault of docs/explanation/delivery.md, injected into real processes. `stage` is where, `catalogue` what."""
