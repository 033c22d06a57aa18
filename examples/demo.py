"""`kvasir demo` into examples/homework/results, where `make ui` looks; --out names another folder."""

import sys
from pathlib import Path

from kvasir import cli

if __name__ == "__main__":
    sys.exit(cli.run_command(["demo", "--out", str(Path(__file__).parent / "homework/results"), *sys.argv[1:]]))
