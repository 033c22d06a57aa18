"""A worker as a process, with its page."""
