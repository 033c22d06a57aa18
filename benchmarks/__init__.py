"""Figures with their caveats. Each module runs alone (`python -m benchmarks.NAME`) and ends with one line of JSON."""
