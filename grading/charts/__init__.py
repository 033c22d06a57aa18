"""Charts of a class and of a run as SVG, used on the desk, in `report.html` and by `kvasir plan --chart`."""
