"""The script that Streamlit runs for every look at the desk: arguments in, page out."""

from __future__ import annotations

import sys
from pathlib import Path

from desk.pages.page import show_desk_page
from infra.config import next_command
from kvasir.desk_app.configuration import open_desk


def main(arguments: list[str]) -> None:
    """HOME CONFIG [FOLDER…]; an empty CONFIG stands for none."""
    home, config, *extra_folders = arguments
    config_file = Path(config) if config else None
    next_command.keep(config_file)
    show_desk_page(lambda: open_desk(config_file, Path(home), [Path(folder) for folder in extra_folders]))


if __name__ == "__main__":
    main(sys.argv[1:])
