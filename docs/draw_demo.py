"""The picture of the demo in README.md: what `make demo` calls, in a real terminal, halfway and at the end.

    python -m docs.draw_demo

Needs tmux, which is the terminal, and Chromium, which draws what tmux held. Below the line stands what the terminal
showed at the end and not yet halfway. The checkout's path is shown as ~/kvasir; the demo's old results are removed.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from docs.pictures import FOLDER, ROOT, note
from tests.support.browser import Browser
from tests.support.waiting import wait_until

PICTURE = FOLDER / "demo.png"
RESULTS = "examples/homework/results"
COLUMNS, ROWS = 116, 50
HALFWAY = re.compile(r"\b(4[5-9]|5\d|6[0-5])%")
_STYLE = "margin:0;padding:14px 18px;color:#d8dade;font:14px/19px 'DejaVu Sans Mono',monospace;white-space:pre"
_PAGE = '<meta charset=utf-8><body style="margin:0;background:#0c0c0c"><div style="{0}">{1}</div>{2}'
_LINE = '<hr style="border:0;border-top:1px solid #3a3f46;margin:0">'


def main() -> None:
    """Run it, keep two looks at it, and draw them."""
    shutil.rmtree(ROOT / RESULTS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        halfway, ended = _looks(folder)
        later = [line for line in ended if line not in halfway]
        first, second = ["$ make demo", *halfway], later
        page = folder / "terminal.html"
        page.write_text(
            _PAGE.format(_STYLE, _html(first), f'{_LINE}<div style="{_STYLE}">{_html(second)}</div>'), "utf-8"
        )
        with Browser(folder / "browser", 1040, 58 + 19 * (len(first) + len(second))) as browser:
            browser.open(page.as_uri())
            browser.wait_for("Open next")
            browser.picture(PICTURE)
    note(PICTURE, "python -m docs.draw_demo", "kvasir-demo")


def _looks(folder: Path) -> tuple[list[str], list[str]]:
    """The lines of the screen with their colours, halfway and at the end."""
    tmux = ["tmux", "-S", str(folder / "tmux")]
    kept: list[list[str]] = []

    def reached(pattern: re.Pattern[str]) -> bool:
        lines = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True).stdout
        if pattern.search(lines):
            lines = lines.replace(str(ROOT), "~/kvasir")
            kept.append([line for line in lines.splitlines() if re.sub(r"\x1b\[[\d;]*m", "", line).strip()])
        return bool(pattern.search(lines))

    command = f"cd {ROOT}; {sys.executable} -m kvasir demo --out {RESULTS}; sleep 60"
    subprocess.run([*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), command], check=True)
    try:
        wait_until(lambda: reached(HALFWAY), "the bar stands at about the half", 120, poll_s=0.05)
        wait_until(lambda: reached(re.compile("Open next")), "the demo has ended", 240)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    return kept[0], kept[1]


def _html(lines: Sequence[str]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format="{code}", theme=MONOKAI)


if __name__ == "__main__":
    main()
