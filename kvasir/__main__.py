"""`python -m kvasir`."""

from kvasir.cli import main

main()
