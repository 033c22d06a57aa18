"""Earlier versions of this program against today's: `make test-upgrade`."""
