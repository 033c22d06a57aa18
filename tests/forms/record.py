"""Records what this program writes and says: `python -m tests.forms.record FOLDER`.

`release_0_1_0` holds what release 0.1.0 wrote and said; the tests beside it compare today's program with it, and have
it read what is there. None of it is ever made anew to make a test pass: whoever changes one of these forms breaks what
lies in queues, folders and clients' programs. A command may get more options and choices. Another form may get more,
too; then a test fails, and the form of today is kept in `since_0_1_0`. A class that is graded (`class`) and a file of
settings (`kvasir.toml`) are given.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.forms import batches, gateway, public, settings, watching, wire

RELEASE = batches.RELEASE
GIVEN = ("class", "kvasir.toml")
TABLES: dict[str, Callable[[], Any]] = {
    "broker.json": wire.broker,
    "store.json": wire.store,
    "watching.json": watching.recorded,
    "settings.json": settings.recorded,
    "names.json": public.names,
    "commands.json": public.commands,
    "exit-codes.json": public.exit_codes,
}


def record(folder: Path) -> bool:
    """Write everything into `folder`; whether all of it could be made. What can't be is said, and the rest is made."""
    parts: list[tuple[str, Callable[[Path], None]]] = [(name, partial(_table, make)) for name, make in TABLES.items()]
    parts += [
        ("batches", lambda place: batches.record(place.parent)),
        ("gateway", lambda place: gateway.record(place.parent)),
    ]
    whole = True
    for name, write in parts:
        try:
            write(folder / name)
        except Exception:  # noqa: BLE001  one form that can't be had must not hide what became of the others
            whole = False
            sys.stderr.write(f"{name} can't be recorded:\n{traceback.format_exc()}\n")
    return whole


def _table(make: Callable[[], Any], place: Path) -> None:
    text = json.dumps(make(), indent=1, ensure_ascii=False, sort_keys=True)
    place.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(0 if record(Path(sys.argv[1]).resolve()) else 1)
