"""How much code one job runs through: its functions, traced from submission to journal, and each room's statements.

One job of 2,000 prompt tokens, three quarters of them its class's prefix, goes through a pipeline in one process:
broker and store in memory, a simulated engine, a prefill and a decode worker as threads, and the owner of the batch
(`Runner`) in the main thread. Every call in every thread is traced. The job is the first of its process, and comes
after a second in which the workers have had nothing to do.

    executed        the functions of the rooms that ran for the job: from `Runner.run` until its result is in the
                    journal, its deliveries are acked and its own blocks deleted
    spine           those of them that anyone who follows the job has to read: without the adapters of broker and store,
                    the engine, and the helpers that everything shares

For each of the two, in all and for owner, prefill and decode (by thread: what a worker's threads call is that
worker's):

    functions       functions and methods at the top of a module or class. Closures, lambdas and comprehensions are part
                    of the function that they are written in. What dataclasses generate is not counted.
    files           files in which these functions stand
    lines           lines of these functions from `def` to the end, without docstrings, comments and blank lines
    room_switches   pairs of a function and one that it calls in another room, each pair once. A call through functions
                    that are left out counts for those at its ends: the worker's call of the cluster state, through an
                    adapter.

In `executed` the figures in all include everything; `adapters` and `engines` are given apart, and the stages are
without them. `benchmarks.path_parts` lists which function belongs where.

    statements      of all modules of a room: every ast.stmt, nested ones too, docstrings excepted

Polling is left out. A worker's loop turns all the time; a turn counts, with all that it calls, if it takes a step of
the job. Steps are the functions that docs/one_job.md names, except those that an idle pipeline calls as well. So
heartbeats, housekeeping and empty looks at a queue do not count, while the function that receives deliveries does, for
the turn in which it received this one. What is polled within such a turn is listed with the other parts.

What the figures do not show: start-up; reading a class and grading its answers, which belong to a batch and not to a
job; errors, retries, stealing and cancelling; RabbitMQ, Redis and real engines; observers (this one does nothing).
They depend on the code alone: neither the seed nor `--quick` changes them. Python 3.11 made those that are kept.

    --list          also every function of the spine, in the order of its first call
    --keep          write the figures in all to path_figures.json; a test allows 5 % more than these
    --no-statements    leave the statements out, which takes a second less
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks import harness
from benchmarks.path_parts import ADAPTERS, ENGINES, POLLING, ROOMS, SHARED
from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import Sampling, user_prompt
from messages.lifecycle import Event
from producers.batch.batch import Batch, BatchEntry, Counts
from producers.batch.runner import JobSpec, Runner

ROOT = Path(__file__).resolve().parents[1]
FIGURES = Path(__file__).with_name("path_figures.json")
PAGE = ROOT / "docs/one_job.md"
LISTED = "## Every function on the way"
INTRODUCTION = """By file, and within a file in the order in which a job of 2,000 tokens comes to them, from
`Runner.run` to the journal; without the adapters of broker and store, the engine, and helpers that everything
shares (`benchmarks/path_parts.py` lists those).
`python -m benchmarks.path --keep` writes this list; a test reads it."""
GROUPS = ("spine", "executed")
KEYS = ("functions", "files", "lines", "room_switches")
STAGES = ("owner", "prefill", "decode")
MODEL = "path"
CONFIG = f"""
[models.{MODEL}]
engine = "simulated"
context = 4096
slots = 2
weights = {{ simulated = "sim:scale=0,answer=8,layers=2,kv_heads=1,head_dim=16" }}
"""
TOKENS, SHARED_TOKENS = 2000, 1500
CHARACTERS_PER_TOKEN, TOKENS_AROUND = 4, 3  # of the simulated engine
IDLE_S = 1.1  # workers read the store's clock once a second: by now it is time again
SETTLE_S = 0.2  # the owner has the result sooner than its worker is done with it
PATIENCE_S = 60.0
_ROW = re.compile(r"\| \d+ \| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|")


@dataclass(frozen=True, slots=True)
class Function:
    """A function of ours, as it stands in its file."""

    file: str
    name: str  # with its class
    line: int
    lines: int

    @property
    def room(self) -> str:
        """Its package."""
        return self.file.partition("/")[0]

    @property
    def place(self) -> str:
        """As the lists and docs/one_job.md name it."""
        return f"{self.file}:{self.name}"

    def is_in(self, part: Iterable[str]) -> bool:
        """Whether an entry of this list means it."""
        return any(
            self.file.startswith(entry) if entry.endswith("/") else entry in (self.file, self.place) for entry in part
        )


@dataclass(eq=False, slots=True)
class Call:
    """One call of a function of ours, and those that came from it; the call above all others of its thread has none."""

    function: Function | None
    above: Call | None
    began: int  # by a counter of all events
    ended: int | None = None
    calls: list[Call] = field(default_factory=list)

    def is_open(self, at: int) -> bool:
        """Whether it had begun by then and not ended."""
        return self.began < at and (self.ended is None or self.ended > at)

    def reaches(self, wanted: Collection[Function]) -> bool:
        """Whether it is a call of one of these, or one came from it. Polling reaches nothing."""
        if self.function and (self.function.is_in(POLLING) or self.function in wanted):
            return self.function in wanted
        return any(call.reaches(wanted) for call in self.calls)


class Trace:
    """Every call of our functions in this and in all threads that are started within the block."""

    def __init__(self) -> None:
        self.threads: dict[threading.Thread, Call] = {}
        self.started_by: dict[threading.Thread, threading.Thread] = {}
        self._now: dict[threading.Thread, Call] = {}
        self._events = count()
        self._of_code: dict[CodeType, Function | None] = {}

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def mark(self) -> int:
        """This moment, to compare with those of calls."""
        return next(self._events)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code is threading.Thread.start.__code__ and event == "call":
            self.started_by[frame.f_locals["self"]] = threading.current_thread()
        if code not in self._of_code:
            self._of_code[code] = function_of(code.co_filename, code.co_firstlineno)
        function = self._of_code[code]
        if function is None:
            return
        thread = threading.current_thread()
        if event == "call":
            above = self._now.get(thread) or self._top(thread)
            self._now[thread] = call = Call(function, above, next(self._events))
            above.calls.append(call)
        elif (ends := self._now.get(thread)) and ends.function is function and ends.above:
            ends.ended = next(self._events)
            self._now[thread] = ends.above

    def _top(self, thread: threading.Thread) -> Call:
        return self.threads.setdefault(thread, Call(None, None, next(self._events)))


def function_of(file: str, line: int) -> Function | None:
    """The function of ours that the code which begins there is part of."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in ROOMS:
        return None
    return next((one for first, last, one in functions(path) if first <= line <= last), None)


@cache
def functions(path: Path) -> list[tuple[int, int, Function]]:
    """All functions in a file, each with its first line, decorators included, and its last."""
    source = path.read_text("utf-8")
    rows = source.splitlines()
    file = path.relative_to(ROOT).as_posix()

    def within(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[int, int, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                last = node.end_lineno or node.lineno
                yield first, last, Function(file, prefix + node.name, node.lineno, _code_lines(node, rows))

    return list(within(ast.parse(source).body, ""))


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, rows: Sequence[str]) -> int:
    numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for inner in ast.walk(node):
        if docstring := _docstring(inner):
            numbers -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return sum(1 for number in numbers if (row := rows[number - 1].strip()) and not row.startswith("#"))


def _docstring(node: ast.AST) -> ast.stmt | None:
    body = getattr(node, "body", None)
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if documented and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return body[0] if isinstance(body[0].value.value, str) else None
    return None


def statements(room: str) -> int:
    """Statements of a room's modules, nested ones too, docstrings excepted."""
    return sum(_statements(ast.parse(path.read_text("utf-8"))) for path in (ROOT / room).rglob("*.py"))


def _statements(node: ast.AST) -> int:
    """Those in a node's bodies. Expressions hold none, and are not gone through: they are most of a tree."""
    found = -1 if _docstring(node) else 0
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else ():
            found += isinstance(each, ast.stmt) + _statements(each)
    return found


class _SilentProgress:
    """A `Progress` that tells nobody."""

    def update(self, counts: Counts) -> None:
        """New figures."""

    def say(self, sentence: str) -> None:
        """Something a person should know."""


@dataclass(frozen=True, slots=True)
class TracedJob:
    """What was traced, and the two moments between which the owner ran its batch of one job."""

    trace: Trace
    began: int
    ended: int


def traced_job() -> TracedJob:
    """One job through a pipeline in this process. Raises RuntimeError if it did not go through the store."""
    with tempfile.TemporaryDirectory() as name, Trace() as trace:
        folder = Path(name)
        (folder / "kvasir.toml").write_text(CONFIG)
        settings = load_settings(config=folder / "kvasir.toml", environ={})
        with connect(settings, observe=_look_away) as client, Batch(folder / "batch") as batch:
            own_tokens = TOKENS - SHARED_TOKENS - TOKENS_AROUND
            prompt = user_prompt(_text("rubric ", SHARED_TOKENS), _text("answer ", own_tokens))
            sampling = Sampling(max_tokens=16)
            job = client.new_job(batch.batch_id, "item", MODEL, prompt, sampling)
            batch.plan([BatchEntry(job.job_id, job.item_id, MODEL, "code", "ada")], request={})
            runner = Runner(batch, [JobSpec(job.job_id, "item", MODEL, prompt, sampling)], client, _SilentProgress())
            time.sleep(IDLE_S)
            began = trace.mark()
            runner.run(max_wait_s=PATIENCE_S)
            time.sleep(SETTLE_S)
            ended = trace.mark()
            result = batch.result(job.job_id)
    # Leaving has waited for the workers: what they had begun for the job is traced to its end.
    if result is None or result.state != "succeeded" or result.decode.kv_transfer != "verified":
        raise RuntimeError(f"the job did not go through the store: {result}")
    if result.decode.prompt_tokens != TOKENS:
        raise RuntimeError(f"the prompt has {result.decode.prompt_tokens:,} tokens, not {TOKENS:,}")
    return TracedJob(trace, began, ended)


def _look_away(_moment: Event) -> None:
    """An observer that does nothing."""


def _text(word: str, tokens: int) -> str:
    characters = tokens * CHARACTERS_PER_TOKEN
    return (word * characters)[:characters]


def steps(job: TracedJob) -> set[Function]:
    """The functions that docs/one_job.md names, without those that an idle pipeline calls too."""
    named = {f"{file}:{name}" for file, name in _ROW.findall(PAGE.read_text("utf-8"))}
    idle: set[Function] = set()
    busy: set[Function] = set()
    for top in job.trace.threads.values():
        for call in _all_calls(top):
            if call.function and call.function.place in named:
                (idle if call.began < job.began else busy).add(call.function)
    return busy - idle


def _all_calls(top: Call) -> Iterator[Call]:
    for call in top.calls:
        yield call
        yield from _all_calls(call)


@dataclass(frozen=True, slots=True)
class JobPath:
    """The calls that were made for the job, by stage and in the order in which they began."""

    calls: dict[str, list[Call]]

    def figures(self, wanted: Callable[[Function], bool], stages: Sequence[str] = STAGES) -> dict[str, int]:
        """Of the wanted functions, in these stages."""
        calls = [call for stage in stages for call in self.calls[stage]]
        found = {call.function for call in calls if call.function and wanted(call.function)}
        pairs = {(above, call.function) for call in calls if call.function in found and (above := _caller(call, found))}
        return {
            "functions": len(found),
            "files": len({function.file for function in found}),
            "lines": sum(function.lines for function in found),
            "room_switches": sum(above.room != function.room for above, function in pairs if function),
        }

    def in_order(self, wanted: Callable[[Function], bool], stage: str) -> dict[Function, set[Function]]:
        """The wanted functions of a stage by their first calls, each with those that call it."""
        calls = sorted(self.calls[stage], key=lambda call: call.began)
        found = {call.function for call in calls if call.function and wanted(call.function)}
        callers: dict[Function, set[Function]] = {}
        for call in calls:
            if call.function in found and call.function:
                above = _caller(call, found)
                callers.setdefault(call.function, set()).update([above] if above and above != call.function else [])
        return callers


def _caller(call: Call, found: Collection[Function | None]) -> Function | None:
    """The nearest of these from which a call came."""
    above = call.above
    while above and above.function not in found:
        above = above.above
    return above.function if above else None


def way_of(job: TracedJob) -> JobPath:
    """What ran for the job: see above. Raises RuntimeError if a stage took no step, or nothing listed was polled."""
    wanted = steps(job)
    everything = {call.function for top in job.trace.threads.values() for call in _all_calls(top) if call.function}
    _check_entries(POLLING, everything)
    calls: dict[str, list[Call]] = {stage: [] for stage in STAGES}
    by_worker: dict[threading.Thread, list[Call]] = defaultdict(list)
    for thread, top in job.trace.threads.items():
        worker = thread
        while (starter := job.trace.started_by.get(worker)) and starter is not threading.main_thread():
            worker = starter
        by_worker[worker] += job_calls(job, top, wanted)
    for worker, found in by_worker.items():
        rooms = {call.function.room for call in found if call.function}
        if worker is threading.main_thread():
            calls["owner"] += found
        elif found:
            (stage,) = (stage for stage in STAGES if f"{stage}_worker" in rooms)
            calls[stage] += found
    if missing := [stage for stage in STAGES if not any(call.function in wanted for call in calls[stage])]:
        raise RuntimeError(f"docs/one_job.md names no step of {', '.join(missing)} that an idle pipeline does not take")
    return JobPath(calls)


def job_calls(job: TracedJob, top: Call, wanted: Collection[Function]) -> list[Call]:
    """Those calls of a thread that were made for the job, whose steps are the `wanted` functions."""
    if job.began < top.began < job.ended:  # started for it
        return [each for call in top.calls for each in _counted(job, call, wanted)]
    return [
        each
        for call in top.calls
        if job.began < call.began < job.ended or (call.is_open(job.began) and call.reaches(wanted))
        for each in _counted(job, call, wanted)
    ]


def _counted(job: TracedJob, call: Call, wanted: Collection[Function]) -> Iterator[Call]:
    if call.function and call.function.is_in(POLLING):
        return
    yield call
    for below in _turns_with_steps(job, call, wanted) if _is_loop(job, call, wanted) else call.calls:
        yield from _counted(job, below, wanted)


def _is_loop(job: TracedJob, call: Call, wanted: Collection[Function]) -> bool:
    """Whether it has been turning since before the job, and does more than the one turn that was under way then."""
    is_turn = call.above and sum(each.function is call.function for each in call.above.calls) > 1
    return not is_turn and call.is_open(job.began) and call.reaches(wanted)


def _turns_with_steps(job: TracedJob, loop: Call, wanted: Collection[Function]) -> Iterator[Call]:
    """A turn ends where the loop calls a function for the second time. What ended before the first is start-up."""
    turns: list[list[Call]] = [[]]
    for call in loop.calls:
        if any(earlier.function is call.function for earlier in turns[-1]):
            turns.append([])
        turns[-1].append(call)
    turns[0] = [call for call in turns[0] if call.began > job.began or call.is_open(job.began)]
    for turn in turns:
        begun = [call for call in turn if call.began < job.ended]
        if any(call.reaches(wanted) for call in begun):
            yield from begun


def is_spine(function: Function) -> bool:
    """Whether somebody who follows the job has to read it."""
    return not function.is_in((*ADAPTERS, *ENGINES, *SHARED))


def measured(way: JobPath) -> dict[str, Any]:
    """Both groups. Raises RuntimeError if an entry of the lists means nothing that ran."""
    ran = {call.function for calls in way.calls.values() for call in calls if call.function}
    _check_entries((*ADAPTERS, *ENGINES, *SHARED), ran)

    def is_apart(function: Function) -> bool:
        return function.is_in((*ADAPTERS, *ENGINES))

    spine = way.figures(is_spine) | {stage: way.figures(is_spine, [stage]) for stage in STAGES}
    stages = {stage: way.figures(lambda function: not is_apart(function), [stage]) for stage in STAGES}
    apart = {
        "adapters": way.figures(lambda function: function.is_in(ADAPTERS)),
        "engines": way.figures(lambda function: function.is_in(ENGINES)),
    }
    return {"spine": spine, "executed": way.figures(lambda _function: True) | stages | apart}


def _check_entries(part: Iterable[str], ran: Collection[Function]) -> None:
    if unknown := [entry for entry in part if not any(function.is_in([entry]) for function in ran)]:
        raise RuntimeError(f"the job called nothing in {', '.join(unknown)}: mend benchmarks/path_parts.py")


def report(figures: dict[str, Any]) -> None:
    """For people."""
    print(f"{'':20}" + "".join(f"{key:>15}" for key in KEYS))
    for group in GROUPS:
        rows = {group: figures[group]} | {f"  {name}": row for name, row in figures[group].items() if name not in KEYS}
        for name, row in rows.items():
            print(f"{name:20}" + "".join(f"{row[key]:15,}" for key in KEYS))
    if by_room := figures.get("statements"):
        rooms = ", ".join(f"{room} {number:,}" for room, number in by_room.items())
        print(f"\nstatements: {sum(by_room.values()):,} ({rooms})")


def list_spine(way: JobPath) -> None:
    """Every function of the spine, by stage."""
    for stage in STAGES:
        print(f"\n{stage}: lines, callers, where")
        for function, callers in way.in_order(is_spine, stage).items():
            print(f"{function.lines:4}{len(callers):4}  {function.file}:{function.line} {function.name}")


def write_page(way: JobPath) -> None:
    """The list of all these functions, in docs/one_job.md."""
    text = []
    for stage in STAGES:
        by_file: dict[str, list[str]] = defaultdict(list)
        for function in way.in_order(is_spine, stage):
            by_file[function.file].append(f"`{function.name}`")
        text += [f"**{stage.capitalize()}**", ""]
        text += [f"- `{file}`: {', '.join(names)}" for file, names in by_file.items()]
        text.append("")
    before = PAGE.read_text("utf-8").partition(LISTED)[0].rstrip()
    PAGE.write_text(f"{before}\n\n{LISTED}\n\n{INTRODUCTION}\n\n" + "\n".join(text[:-1]) + "\n", "utf-8")


def main() -> int:
    """Trace, count, and end with the line of JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="nothing but the line of JSON")
    parser.add_argument("--list", action="store_true", help="also every function of the spine")
    parser.add_argument(
        "--keep", action="store_true", help="write the figures to path_figures.json, the list to the page"
    )
    parser.add_argument("--no-statements", action="store_true", help="without these: a second less")
    options = parser.parse_args()
    way = way_of(traced_job())
    figures = measured(way)
    if not options.no_statements:
        figures["statements"] = {room: statements(room) for room in ROOMS}
    if options.keep:
        kept = {group: {key: figures[group][key] for key in KEYS} for group in GROUPS}
        FIGURES.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
        write_page(way)
    if not options.json:
        report(figures)
    if options.list:
        list_spine(way)
    harness.finish(**figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
