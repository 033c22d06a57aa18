"""Finds students' names in texts, and replaces them."""
