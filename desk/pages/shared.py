"""What every page uses: the process's one desk, moving about, and showing other people's text safely."""

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
CACHE_SIZE = 12  # drawn submissions and pictures that are kept for the next click on them
HELD_S = 600.0  # how long a submission counts as open with whoever looked at it last
_MOST_BUTTONS = 9  # points of a criterion: as many as there are keys
COOKIE = "kvasir_desk"  # this browser's id and its person's name


@dataclass
class Desk:
    """Everything that outlives a page: shared by all tabs of a process."""

    backend: Backend
    fleet: FleetWatch
    rubrics: dict[tuple[str, Path], RubricDraft] = field(default_factory=dict)  # by browser and version
    _views: dict[Path, BatchView] = field(default_factory=dict)
    _open: dict[tuple[Path, str], tuple[str, float]] = field(default_factory=dict)  # by browser
    _decisions: dict[Path, Decisions] = field(default_factory=dict)
    _acts: dict[Path, Acts] = field(default_factory=dict)
    _stages: dict[Path, Stages] = field(default_factory=dict)
    _facts: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)  # with the stamp of what each is made of
    _drawn: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)  # so too, those asked for last at the end
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def folders(self) -> list[Path]:
        """All assignments."""
        return find_folders(self.backend.home, self.backend.extra_folders)

    def title(self, folder: Path) -> str:
        """What the assignment is called; read again only when its files have changed."""
        stamp = tuple(_mtime_ns(folder / name) for name in (FILE, "batch.json"))
        return self._latest(self._facts, ("title", folder), stamp, lambda: read_inputs(folder).title)

    def view(self, folder: Path) -> BatchView:
        """The batch in this folder, caught up."""
        with self._lock:
            view = self._views.setdefault(folder, BatchView(folder, self.backend.request_of))
        return view.refresh()

    def decisions(self, folder: Path) -> Decisions:
        """The decisions of an assignment."""
        with self._lock:
            return self._decisions.setdefault(folder, Decisions(folder))

    def acts(self, folder: Path) -> Acts:
        """What was done on an assignment's review screen."""
        with self._lock:
            return self._acts.setdefault(folder, Acts(folder))

    def note_open(self, folder: Path, item_id: str, browser: str) -> None:
        """This browser looks at this submission now, and at no other of the class."""
        with self._lock:
            self._open[folder, browser] = item_id, time.monotonic()

    def open_elsewhere(self, folder: Path, browser: str) -> set[str]:
        """Submissions that others look at: no browser is led to them, and each may still choose them."""
        since = time.monotonic() - HELD_S
        with self._lock:
            open_items = list(self._open.items())
        return {
            item
            for (class_folder, viewer), (item, at) in open_items
            if class_folder == folder and viewer != browser and at > since
        }

    def stages(self, folder: Path) -> Stages:
        """The stages of an assignment's, or a round's, grading."""
        with self._lock:
            return self._stages.setdefault(folder, Stages(folder / "runs" / "grade" / "log"))

    def rows(self, folder: Path) -> tuple[BatchView, list[Row], dict[str, Overrides]]:
        """The class now. Raises BatchError if the batch can't be read."""
        view, decisions = self.view(folder), self.decisions(folder)
        overrides_by_item = dict(decisions.refresh())
        stamp = (
            view.version,
            decisions.version,
            _mtime_ns(folder / TIMES),
            _mtime_ns(folder / REQUESTS),
        )  # before the rows: what comes in between makes them again next time
        rows = self._latest(self._facts, ("rows", folder), stamp, lambda: make_rows(view, overrides_by_item))
        return view, list(rows), overrides_by_item

    def cost(self, folder: Path, rubric: Rubric, names: Sequence[str] = ()) -> str:
        """What regrading these submissions with this rubric would ask, in words; counted again when either changes."""
        view = self.view(folder)
        stamp = (view.version, rubric.digest, tuple(names))
        cost = self._latest(self._facts, ("cost", folder), stamp, lambda: view.cost(rubric, names))
        return str(cost) if cost.jobs or cost.removed else "Nothing would be asked: it is all answered."

    def version(self, folder: Path) -> tuple[int, ...]:
        """Which `rows` were given out last."""
        with self._lock:
            stamp: tuple[int, ...] = self._facts["rows", folder][0]
            return stamp

    def by_people(self, folder: Path) -> tuple[int, ...]:
        """The part of `version` that people make: what they decided, asked and replied; no new result changes it."""
        return self.version(folder)[1:]

    def get_or_make(self, key: Hashable, stamp: Hashable, make: Callable[[], T]) -> T:
        """What `make` drew for this key, as `_latest`; only the last few that were asked for are kept."""
        content = self._latest(self._drawn, key, stamp, make)
        with self._lock:
            while len(self._drawn) > CACHE_SIZE:
                del self._drawn[next(iter(self._drawn))]
        return content

    def _latest(
        self, entries: dict[Hashable, tuple[Any, Any]], key: Hashable, stamp: Hashable, make: Callable[[], T]
    ) -> T:
        """What `make` made for this key, made again only with another stamp: the version of what it is made of."""
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


# An argument with an underscore is no part of the key.
@st.cache_resource(show_spinner=False)  # type: ignore[untyped-decorator]
def get_desk(_open_backend: Callable[[], Backend]) -> Desk:
    """The process's desk, made once."""
    backend = _open_backend()
    # Half a second of imports that Streamlit leaves to the first table: done with the first page, and in its thread,
    # since two threads that import them at once can see them half made.
    for name in ("pandas", "pyarrow"):
        importlib.import_module(name)
    # Streamlit collects after every run of a page, before it has sent all that the run drew: with the modules of pandas
    # and pyarrow to walk over, that took longer than the run itself.
    gc.collect()
    gc.freeze()
    return Desk(backend, FleetWatch(backend.fleet))


def draw_live(draw: Callable[[], None], every_s: float | None = None, work: Work | None = None) -> None:
    """Draw a part of the page that draws itself again without the rest: every so often, or after a click in it.

    With `work` only as long as that runs; when it has ended, the whole page is drawn again. An error in the part is
    shown in its place.
    """
    is_running = work is not None and work.is_alive
    page_state = {name: st.session_state.get(name) for name in ("assignment", "section", "acted")}

    def draw_here() -> None:
        # Streamlit may answer a click on the side bar together with one in here, and then draws this part alone; and
        # what a button in here has done may change the rest.
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
    """Draw a button, in `at`, for what has to be done even if its reader is in another section by then.

    It sends the `form` that it ends, if it ends one. What was typed just before, `action` finds in the session's state.

    Streamlit may answer two quick clicks by one run, which draws the second one's section alone: there an `if` around
    the button is never reached. A callback runs first. Why it failed is said here, below the columns if `at` is one.
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
    """Say so until it has ended; then the page is drawn again."""

    def wait() -> None:
        st.info(message)
        if not work.is_alive:
            st.rerun()

    draw_live(wait, REFRESH_S / 2)


@contextmanager
def show_errors() -> Iterator[None]:
    """What goes wrong on purpose is said in a sentence, where it happened."""
    try:
        yield
    except KvasirError as error:
        st.error(escape_markdown(str(error)))


def show_problem(view: BatchView) -> None:
    """What is wrong with the batch, if anything is."""
    if view.problem:
        st.error(escape_markdown(view.problem))


def identify_browser() -> None:
    """Know the browser, and the name that it keeps, by its cookie."""
    state = st.session_state
    if "browser" not in state:
        browser, _, state["me"] = unquote(st.context.cookies.get(COOKIE, "")).partition(" ")
        state["browser"] = browser or uuid4().hex


def browser_key(folder: Path) -> str:
    """What an assignment is called in what a browser keeps of it."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def decider() -> str:
    """The name under which a decision is kept: the one that the person gave, else that of the account."""
    return str(st.session_state.get("me") or account())


def pictures(desk: Desk, key: Hashable, stamp: Hashable, draw: Callable[[], Iterable[Picture]]) -> str:
    """Pictures below each other, beside each other where there is space; light or dark as the page is. "" for none.

    Drawn again only when their `stamp` has changed.
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
    """A button for each whole number of points, where these are few; keys press those of the criterion at hand.

    `field` is the key of the number that they set; `on_click` is called with the points, and then `args`.
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
    """Large figures beside each other, by their labels."""
    for column, (label, value) in zip(st.columns(len(figures)), figures.items(), strict=True):
        column.metric(label, value)


def show_table(rows: Sequence[Mapping[str, object]], label: str) -> None:
    """Rows that are only read; `label` is what they are, for those who can't see them."""
    markup = Markup()
    markup.rows(rows, label)
    markup.draw()


def show_text(body: str) -> None:
    """Somebody else's text as it is, with its line breaks; nothing in it is acted upon."""
    st.code(body, language=None, wrap_lines=True)
