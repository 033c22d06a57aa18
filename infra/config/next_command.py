"""Commands that people are told to type next. They include the --config that the person gave, and are quoted for a
shell."""

import shlex
from pathlib import Path

UPGRADE_COMMAND = "python -m pip install --upgrade kvasir-inference"  # upgrades the program that prints this command

_config_option: list[str] = []  # options that come before a command's name


def keep(config: Path | None) -> None:
    """Remember the --config that this process was given, or that it was given none."""
    _config_option[:] = ["--config", str(config)] if config else []


def next_command(*words: object) -> str:
    """`kvasir --config mine.toml watch results/homework4`."""
    return shlex.join(["kvasir", *_config_option, *map(str, words)])
