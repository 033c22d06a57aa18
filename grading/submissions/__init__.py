"""Reads what students hand in (files, zips and notebooks) into parts, and cuts it to size."""
