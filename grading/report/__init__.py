"""Stores a class's grades, and makes the page that shows them."""
