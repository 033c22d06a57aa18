"""A tiny model to try Kvasir with, and how it was trained."""
