"""The script that Streamlit runs each time a page of the desk is shown."""

import sys
from pathlib import Path

from desk.pages.page import show_desk_page
from infra.config import next_command
from infra.config.settings import load_settings
from kvasir.desk_app.configuration import DeskBackend


def main(arguments: list[str]) -> None:
    """Show the page. The arguments are HOME CONFIG [FOLDER…]; an empty CONFIG means none."""
    home, config, *extra_folders = arguments
    config_file = Path(config) if config else None
    next_command.keep(config_file)
    folders = [Path(folder) for folder in extra_folders]
    show_desk_page(lambda: DeskBackend(load_settings(config=config_file), config_file, Path(home), folders))


if __name__ == "__main__":
    main(sys.argv[1:])
