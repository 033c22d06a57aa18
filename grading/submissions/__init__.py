"""What students hand in: files, zips and notebooks, read into parts and cut to size."""
