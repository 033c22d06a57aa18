"""`kvasir ui`: opens the grading desk in a browser."""

import importlib.util
import os
import sys
from pathlib import Path

import click

from desk.assignments import find_folders, resume_interrupted
from kvasir.desk_app.configuration import DeskBackend
from kvasir.options import Globals
from messages.errors import ConfigError

_APP = Path(__file__).parents[1] / "desk_app" / "app.py"
_UPLOAD_MB = 1024


@click.command()
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results/desk"),
    show_default=True,
    help="Create new assignments in this folder.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8501, show_default=True)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Listen on this address. The desk has no login, so anybody who reaches the address can use it.",
)
@click.pass_obj
def ui(global_options: Globals, folders: tuple[Path, ...], home: Path, port: int, host: str) -> None:
    """Open the grading desk in a browser. FOLDERS are batches that were graded elsewhere and are shown too.

    Ctrl-C closes the desk; a grading that runs goes on without it.
    """
    settings = global_options.settings()  # report configuration errors here, not in the browser
    if importlib.util.find_spec("streamlit") is None:
        raise ConfigError("kvasir ui needs Streamlit, which is missing: pip install 'kvasir-inference[ui]', or make ui")
    shown_folders = find_folders(home, folders)
    for folder in folders:
        if folder not in shown_folders:
            click.echo(f"{folder} holds no batch yet; it is shown when it does", err=True)
    config = str(global_options.config.absolute()) if global_options.config else ""
    extra_folders = [str(folder.absolute()) for folder in folders]
    arguments = [*_server(host, port), "--", str(home.absolute()), config, *extra_folders]
    for folder, why_not in resume_interrupted(DeskBackend(settings, global_options.config, home)):
        consequence = f"it is not taken up by itself, because {why_not}" if why_not else "it goes on where it stopped"
        click.echo(f"the grading in {folder} was cut off; {consequence}", err=True)
    if sys.stdout:
        sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(_APP), *arguments])


def _server(host: str, port: int) -> list[str]:
    """Streamlit's server settings: open no browser, send no statistics, watch no files."""
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": "true",
        "server.maxUploadSize": _UPLOAD_MB,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
    }
    return [f"--{name}={value}" for name, value in options.items()]
