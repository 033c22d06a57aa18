"""A tiny random-weight model to try Kvasir with, and the script that makes it."""
