"""Commands that people are told to type next, with the configuration that they gave, and quoted for a shell."""

import shlex
from pathlib import Path

UPGRADE_COMMAND = "python -m pip install --upgrade kvasir-inference"  # upgrades this installation of Kvasir

_config_option: list[str] = []  # options to print between `kvasir` and the command's name


def keep(config: Path | None) -> None:
    """Remember the file that this process was given with --config, or None."""
    _config_option[:] = ["--config", str(config)] if config else []


def next_command(*words: object) -> str:
    """Return a command such as `kvasir --config mine.toml watch results/homework4`."""
    return shlex.join(["kvasir", *_config_option, *map(str, words)])
