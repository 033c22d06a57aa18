"""The script that Streamlit runs for every look at the desk: arguments in, page out."""

from __future__ import annotations

import sys
from pathlib import Path

from kvasir.desk.backend import open_desk
from producers.app.page import show


def main(arguments: list[str]) -> None:
    """HOME CONFIG [FOLDER…]; an empty CONFIG stands for none."""
    home, config, *more = arguments
    show(lambda: open_desk(Path(config) if config else None, Path(home), [Path(folder) for folder in more]))


if __name__ == "__main__":
    main(sys.argv[1:])
