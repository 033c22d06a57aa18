"""Code that all pages use: the desk of this process, navigation, and the safe display of other people's text."""

import gc
import hashlib
import importlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote
from uuid import uuid4

import streamlit as st

from desk.assignments import FILE, find_folders, read_inputs
from desk.backend import Backend
from desk.decisions import Decisions, Overrides, account
from desk.fleet import FleetWatch
from desk.pages.markup import Markup
from desk.pages.rubric_form import RubricDraft
from desk.progress import Stages
from desk.review_screen.acts import Acts
from desk.rows import Row, make_rows
from desk.text import escape_markdown
from desk.view import BatchView
from desk.work import Work
from grading.charts.drawing import Picture
from grading.export.late import FILE as TIMES
from grading.export.requests import FILE as REQUESTS
from grading.rubric.rubric import Points, Rubric
from messages.errors import KvasirError

T = TypeVar("T")

REFRESH_S = 2.0
# Maximum number of drawn submissions and pictures that are kept in memory.
CACHE_SIZE = 12
# A submission counts as open for this many seconds after its page was drawn.
HELD_S = 600.0
# A criterion with more points than this gets no buttons, because there are only nine digit keys.
_MOST_BUTTONS = 9
COOKIE = "kvasir_desk"  # holds this browser's id and the person's name


@dataclass
class Desk:
    """Everything that lasts longer than a page. All tabs of a process share it."""

    backend: Backend
    fleet: FleetWatch
    # The drafts of rubrics, by the browser's id and the path of the edited version.
    rubrics: dict[tuple[str, Path], RubricDraft] = field(default_factory=dict)
    _views: dict[Path, BatchView] = field(default_factory=dict)
    # (folder, browser) -> (item id, time)
    _open: dict[tuple[Path, str], tuple[str, float]] = field(default_factory=dict)
    _decisions: dict[Path, Decisions] = field(default_factory=dict)
    _acts: dict[Path, Acts] = field(default_factory=dict)
    _stages: dict[Path, Stages] = field(default_factory=dict)
    # Computed values, each with the stamp of the files that it was made from.
    _facts: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)
    # Like `_facts`. The most recently used entries are at the end.
    _drawn: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def folders(self) -> list[Path]:
        """All assignments."""
        return find_folders(self.backend.home, self.backend.extra_folders)

    def title(self, folder: Path) -> str:
        """Return the assignment's title. It is read again only if its files have changed."""
        stamp = tuple(_mtime_ns(folder / name) for name in (FILE, "batch.json"))
        return self._latest(self._facts, ("title", folder), stamp, lambda: read_inputs(folder).title)

    def view(self, folder: Path) -> BatchView:
        """Return the batch in this folder, brought up to date."""
        with self._lock:
            view = self._views.setdefault(folder, BatchView(folder, self.backend.request_of))
        return view.refresh()

    def decisions(self, folder: Path) -> Decisions:
        """Return the decisions about an assignment."""
        with self._lock:
            return self._decisions.setdefault(folder, Decisions(folder))

    def acts(self, folder: Path) -> Acts:
        """Return the acts on an assignment's review screen."""
        with self._lock:
            return self._acts.setdefault(folder, Acts(folder))

    def note_open(self, folder: Path, item_id: str, browser: str) -> None:
        """Record that this browser shows this submission, and no other of the class."""
        with self._lock:
            self._open[folder, browser] = item_id, time.monotonic()

    def open_elsewhere(self, folder: Path, browser: str) -> set[str]:
        """Return the submissions that others have open. No browser is led to them, but each may be chosen."""
        since = time.monotonic() - HELD_S
        with self._lock:
            open_items = list(self._open.items())
        return {
            item
            for (class_folder, viewer), (item, at) in open_items
            if class_folder == folder and viewer != browser and at > since
        }

    def stages(self, folder: Path) -> Stages:
        """Return the stages of the grading of an assignment or round."""
        with self._lock:
            return self._stages.setdefault(folder, Stages(folder / "runs" / "grade" / "log"))

    def rows(self, folder: Path) -> tuple[BatchView, list[Row], dict[str, Overrides]]:
        """Return the class now. Raises BatchError if the batch can't be read."""
        view, decisions = self.view(folder), self.decisions(folder)
        overrides_by_item = dict(decisions.refresh())
        # The stamp is taken first. If a file then changes while the rows are made, the next stamp differs, and the rows
        # are made again.
        stamp = (
            view.version,
            decisions.version,
            _mtime_ns(folder / TIMES),
            _mtime_ns(folder / REQUESTS),
        )
        rows = self._latest(self._facts, ("rows", folder), stamp, lambda: make_rows(view, overrides_by_item))
        return view, list(rows), overrides_by_item

    def cost(self, folder: Path, rubric: Rubric, names: Sequence[str] = ()) -> str:
        """Describe what regrading these submissions with this rubric would ask.

        It is counted again when either changes.
        """
        view = self.view(folder)
        stamp = (view.version, rubric.digest, tuple(names))
        cost = self._latest(self._facts, ("cost", folder), stamp, lambda: view.cost(rubric, names))
        return str(cost) if cost.jobs or cost.removed else "Nothing would be asked: it is all answered."

    def version(self, folder: Path) -> tuple[int, ...]:
        """Return the version of the `rows` that were returned last."""
        with self._lock:
            stamp: tuple[int, ...] = self._facts["rows", folder][0]
            return stamp

    def get_or_make(self, key: Hashable, stamp: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` drew for this key, as `_latest`. Only the most recently used results are kept."""
        content = self._latest(self._drawn, key, stamp, make)
        with self._lock:
            while len(self._drawn) > CACHE_SIZE:
                del self._drawn[next(iter(self._drawn))]
        return content

    def _latest(
        self, entries: dict[Hashable, tuple[Any, Any]], key: Hashable, stamp: Hashable, make: Callable[[], T]
    ) -> T:
        """Return what `make` made for this key.

        It is made again if the stamp, the version of its sources, has changed.
        """
        with self._lock:
            entry = entries.get(key)
        if entry is None or entry[0] != stamp:
            entry = (stamp, make())
        with self._lock:
            entries.pop(key, None)
            entries[key] = entry
        return entry[1]


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# Streamlit's cache ignores arguments whose names begin with an underscore.
@st.cache_resource(show_spinner=False)  # type: ignore[untyped-decorator]
def get_desk(_open_backend: Callable[[], Backend]) -> Desk:
    """Return the desk of this process, which is made only once."""
    backend = _open_backend()
    # These imports take half a second. Streamlit would import the modules at the first table, in several threads at
    # once, and a thread could then see a module that is only half imported. So one thread imports them here.
    for name in ("pandas", "pyarrow"):
        importlib.import_module(name)
    # After every run of a page, Streamlit collects garbage before it sends the rest of what was drawn. A pass over the
    # objects of pandas and pyarrow took longer than the run, so they are frozen, which keeps them out of the
    # collection.
    gc.collect()
    gc.freeze()
    return Desk(backend, FleetWatch(backend.fleet))


def draw_live(draw: Callable[[], None], every_s: float | None = None, work: Work | None = None) -> None:
    """Draw a part of the page that is redrawn separately: at intervals, or after a click in it.

    With `work`, it is redrawn only while that work runs; when it ends, the whole page is redrawn. An error in the part
    is shown in its place.
    """
    is_running = work is not None and work.is_alive
    page_state = {name: st.session_state.get(name) for name in ("assignment", "section", "acted")}

    def draw_here() -> None:
        # The whole page must be drawn again if a button in this part has changed the rest of the page. It must also be
        # drawn again if the person has clicked on the side bar too, but Streamlit draws only this part.
        if any(st.session_state.get(name) != value for name, value in page_state.items()):
            st.rerun()
        if is_running and work is not None and not work.is_alive:
            st.rerun()
        with show_errors():
            draw()

    st.fragment(draw_here, run_every=every_s if is_running or work is None else None)()


def action_button(
    label: str, action: Callable[[], object], key: str = "", at: Any = st, form: bool = False, **look: Any
) -> None:
    """Draw a button whose action must be done even if the reader has left the section by then.

    `at` is where to draw it.

    With `form`, the button sends the form that it ends. `action` finds the latest input in the session's state.

    Streamlit may handle two quick clicks in one run, which draws only the second click's section; an `if` around the
    button would never be reached. A callback runs before that. If the action fails, the reason is shown here, below the
    columns if `at` is a column.
    """
    state, id = st.session_state, f"{key or label} {st.session_state['assignment']}"

    def run() -> None:
        state["acted"] = state.get("acted", 0) + 1
        state.pop("failed", None)
        try:
            action()
        except KvasirError as error:
            state["failed"] = id, str(error)

    (at.form_submit_button if form else at.button)(label, key=id, on_click=run, **look)
    failed_id, reason = state.get("failed", ("", ""))
    if failed_id == id:
        st.error(escape_markdown(reason))
        del state["failed"]


def wait_for(work: Work, message: str) -> None:
    """Show the message until the work has ended; then the page is redrawn."""

    def wait() -> None:
        st.info(message)
        if not work.is_alive:
            st.rerun()

    draw_live(wait, REFRESH_S / 2)


@contextmanager
def show_errors() -> Iterator[None]:
    """Show an expected error as a sentence, at the place where it happened."""
    try:
        yield
    except KvasirError as error:
        st.error(escape_markdown(str(error)))


def show_problem(view: BatchView) -> None:
    """Show what is wrong with the batch, if anything is."""
    if view.problem:
        st.error(escape_markdown(view.problem))


def identify_browser() -> None:
    """Recognise the browser, and the name that it keeps, by its cookie."""
    state = st.session_state
    if "browser" not in state:
        browser, _, state["me"] = unquote(st.context.cookies.get(COOKIE, "")).partition(" ")
        state["browser"] = browser or uuid4().hex


def browser_key(folder: Path) -> str:
    """What an assignment is called in what a browser keeps of it."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def decider() -> str:
    """Return the name under which decisions are kept: the person's own, or else the account's."""
    return str(st.session_state.get("me") or account())


def pictures(desk: Desk, key: Hashable, stamp: Hashable, draw: Callable[[], Iterable[Picture]]) -> str:
    """Show pictures side by side if there is space, else one below the other, in the page's light or dark style.

    A picture "" is left out. They are drawn again only if their `stamp` has changed.
    """
    dark = st.context.theme.type == "dark"
    grid = "display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: 24px"

    def draw_grid() -> str:
        cells = "".join(f"<div>{picture.image(dark)}</div>" for picture in draw())
        return f'<div style="{grid}">{cells}</div>' if cells else ""

    return desk.get_or_make((key, dark), stamp, draw_grid)


def point_buttons(
    criterion: str,
    smallest: Points,
    largest: Points,
    step: Points,
    field: str,
    is_current: bool,
    on_click: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Draw a button for each whole number of points, if there are few. Keys press those of the current criterion.

    `field` is the key of the number that they set. `on_click` is called with the points, and then `args`.
    """
    if largest - smallest > _MOST_BUTTONS or step > 1:
        return
    current_points = st.session_state.get(field)
    with st.container(horizontal=True, gap="small", key="points-at-hand" if is_current else None):
        for points in range(int(smallest), int(largest) + 1):
            st.button(
                str(points),
                key=f"give {points} {criterion}",
                type="primary" if current_points == points else "secondary",
                on_click=on_click,
                args=(float(points), *args),
            )


def show_metrics(figures: Mapping[str, Any]) -> None:
    """Show large numbers side by side, by their labels."""
    for column, (label, value) in zip(st.columns(len(figures)), figures.items(), strict=True):
        column.metric(label, value)


def show_table(rows: Sequence[Mapping[str, object]], label: str) -> None:
    """Show a read-only table. `label` describes it for people who can't see it."""
    markup = Markup()
    markup.rows(rows, label)
    markup.draw()


def show_text(body: str) -> None:
    """Show another person's text literally, with its line breaks. Nothing in it is interpreted."""
    st.code(body, language=None, wrap_lines=True)
