"""Pictures of a class and of a run, as SVG: the same on the desk, in `report.html` and from `kvasir plan --chart`."""
