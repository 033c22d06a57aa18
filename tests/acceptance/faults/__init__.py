"""Every fault of docs/reliability.md, injected into real processes. `stage` is where, `catalogue` what."""
