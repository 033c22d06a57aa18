"""What a worker registers about itself in the store, and renews by heartbeat. A worker without a registration counts as
gone."""

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from messages import checks
from messages.errors import InvalidMessage
from messages.kv import KVLayout

WorkerStage = Literal["prefill", "decode"]
BOTH_ROLES: tuple[WorkerStage, ...] = ("prefill", "decode")

MAX_LAYOUT_BYTES = 512
MAX_REFUSALS = 16
MAX_CURVES = MAX_LINKS = MAX_POINTS = MAX_STEALS = 64
_MAX_RATE = 1e11
ENGINE_AWAY = "its engine is away"
SELF_PAUSED = "paused itself"
_PREFILL_SUFFIX = ".prefill"


def prefill_id(worker_id: str) -> str:
    """The worker_id of a process's second registration, for its prefill role; `worker_id` is that of its decode
    role."""
    return worker_id + _PREFILL_SUFFIX


def layout_text(layout: KVLayout | None) -> str:
    """A KV layout as text, for people and for comparing: `48 layers x 4 kv_heads x 128 head_dim; bf16`; "" for none.

    The part before the semicolon is the shape, which must be equal at both ends. The dtype after it may differ, because
    values are cast.
    """
    if layout is None:
        return ""
    shape = f"{layout.num_layers} layers x {layout.kv_heads} kv_heads x {layout.head_dim} head_dim"
    if layout.v_head_dim not in (None, layout.head_dim):
        shape += f" of K, {layout.v_head_dim} of V"
    if layout.window:
        shape += f", window {layout.window} in layers {_ranges(layout.window_layers)}"
    for kind, layers in (("recurrent", layout.recurrent_layers), ("both", layout.both_layers)):
        shape += f", {kind} layers {_ranges(layers)}" if layers else ""
    for name, sizes in (("convolution", layout.conv_shape), ("state", layout.matrix_shape)):
        shape += f", {name} {' x '.join(map(str, sizes))}" if sizes else ""
    return f"{shape[: MAX_LAYOUT_BYTES - 16]}; {layout.dtype}"


def layout_token_bytes(text: str) -> int:
    """Bytes of a token's KV at most, by what `layout_text` says; 0: it says nothing. Windows make it less."""
    sizes = [int(word) for word in text.partition(";")[0].partition(",")[0].split() if word.isdigit()]
    return 2 * math.prod(sizes) * (4 if "; f32" in text else 2) if sizes else 0


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-34 step 2` for an evenly spaced sequence, otherwise every number."""
    ascending = sorted(numbers)
    steps = {after - before for before, after in pairwise(ascending)}
    if len(steps) == 1 and len(ascending) > 2:
        return f"{ascending[0]}-{ascending[-1]} step {steps.pop()}"
    return " ".join(str(number) for number in ascending)


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Rates that a worker has measured for one model, in tokens a second: by prompt length, or by the number of
    parallel sequences."""

    model: str
    at: tuple[float, ...]  # measured at these prompt lengths (tokens), or counts of parallel sequences; ascending
    tokens_per_s: tuple[float, ...]  # one for each value of `at`: rate of a single prompt, or of all sequences together

    def __post_init__(self) -> None:
        checks.model_name("model", self.model)
        _check_columns("at and tokens_per_s", (self.at, self.tokens_per_s), MAX_POINTS)
        if not self.at or any(after <= before for before, after in pairwise((0, *self.at))):
            raise InvalidMessage(
                "'at' must hold at least one number; all numbers must be above 0 and in ascending order"
            )

    def rate(self, at: float) -> float:
        """Tokens a second at `at`: interpolated linearly between two points, constant before the first and after the
        last."""
        points = list(zip(self.at, self.tokens_per_s, strict=True))
        for (x1, rate1), (x2, rate2) in pairwise(points):
            if at <= x2:
                return rate1 + (rate2 - rate1) * max(0.0, at - x1) / (x2 - x1)
        return points[-1][1]


@dataclass(frozen=True, slots=True)
class Link:
    """The bandwidth and round trip that a worker has measured to another machine."""

    peer: str  # its host
    rtt_ms: float = 0.0
    mb_per_s: float = 0.0  # MB/s from the peer on one connection; 0: not measured
    put_mb_per_s: float = 0.0  # MB/s to the peer on one connection; 0: not measured
    parallel_mb_per_s: float = 0.0  # MB/s from the peer on several connections together; 0: not measured
    card_mb_per_s: float = 0.0  # MB/s that this machine's fastest network card has negotiated; 0: not measured
    stalls_at: int = 0  # size in bytes of the smallest test message that did not get through; 0 if all got through
    rmem_max: int = 0  # the largest receive buffer, in bytes, that a program on this machine can request

    def __post_init__(self) -> None:
        checks.text("peer", self.peer, 255)
        for figure in fields(self)[1:]:
            checks.number(figure.name, getattr(self, figure.name), 0, _MAX_RATE)


@dataclass(frozen=True, slots=True)
class WorkerDetails:
    """The part of a registration that the previous release can't read. It is stored beside the registration, under
    another key.

    Every field may be left out; it then says nothing.
    """

    roles: tuple[WorkerStage, ...] = ()  # all roles of the worker's process; each role has its own registration
    prefill_curves: tuple[RateCurve, ...] = ()  # rates by prompt length, one curve for each model
    decode_curves: tuple[RateCurve, ...] = ()  # rates by parallel sequences, one curve for each model
    links: tuple[Link, ...] = ()
    clock_s: float = 0.0  # seconds by which the machine's clock is ahead of the store's
    engine_build: str = ""
    slot_file_version: str = ""  # version of the KV cache files that the worker's engine reads and writes
    paused_because: str = ""  # a sentence that says why the worker paused itself; empty if it is not paused
    template: str = ""  # hash of the prompts that the worker's chat template makes of fixed conversations
    turns: int = 0  # number of `bulk` queues that the worker serves in turn; 0 means only the first
    steals: tuple[str, ...] = ()  # other models of which the worker may take jobs now, in memory or not

    def __post_init__(self) -> None:
        checks.tuple_of("roles", self.roles, str, 2)
        for role in self.roles:
            checks.one_of("roles", role, BOTH_ROLES)
        if len(set(self.roles)) < len(self.roles):
            raise InvalidMessage("roles must not contain the same role twice")
        for name in ("prefill_curves", "decode_curves"):
            curves = getattr(self, name)
            checks.tuple_of(name, curves, RateCurve, MAX_CURVES)
            if len({curve.model for curve in curves}) < len(curves):
                raise InvalidMessage(f"the curves in {name} must be for different models")
        checks.tuple_of("links", self.links, Link, MAX_LINKS)
        checks.tuple_of("steals", self.steals, str, MAX_STEALS)
        checks.whole("turns", self.turns, 0, 1 << 32)
        checks.number("clock_s", self.clock_s, -_MAX_RATE, _MAX_RATE)
        for name in ("engine_build", "slot_file_version", "paused_because", "template"):
            checks.text(name, getattr(self, name), 255)


NO_DETAILS = WorkerDetails()


def _check_columns(name: str, columns: tuple[tuple[float, ...], ...], most: int) -> None:
    """Checks columns of numbers: all must be as long as the first."""
    if any(not isinstance(column, tuple) or len(column) != len(columns[0]) for column in columns):
        raise InvalidMessage(f"{name} must be equally long")
    if len(columns[0]) > most:
        raise InvalidMessage(f"{name} must hold at most {most} numbers")
    for column in columns:
        for value in column:
            checks.number(name, value, 0, _MAX_RATE)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's registration, which status, doctor, stealing and the producers read. Every figure is the worker's
    own."""

    worker_id: str  # host.pid.random; every process has its own
    role: WorkerStage
    model: str  # the model whose queue the worker serves
    engine: str
    device: str  # "cpu", "cuda", "metal", "simulated"
    fingerprint: str  # identifies the KV family; empty if the worker can't transfer KV caches
    tokenizer: str  # hash of the tokenizer; producers without this tokenizer estimate token counts by `chars_per_token`
    context: int  # tokens
    slots: int
    host: str
    pid: int
    started_at: float  # seconds since the epoch, by the store's clock
    chars_per_token: float = 0.0  # measured on a sample text; 0: unknown
    busy: int = 0  # slots in use
    done: int = 0  # jobs finished since start
    tokens_per_s: float = 0.0  # moving average of the rate in the worker's stage; 0 if nothing was measured yet
    transfers_kv: bool = False  # proved at start
    off: str = ""  # why the worker takes no jobs now: paused, outside its hours, SELF_PAUSED or ENGINE_AWAY
    notes: str = ""  # one sentence for the operator
    jobs: tuple[str, ...] = ()  # ids of the jobs that the worker has taken and not finished

    # For decode workers only: the models in memory, with the home model first, and what was measured for each model.
    # 0 means that nothing was measured yet.
    resident: tuple[str, ...] = ()
    resident_tokens_per_s: tuple[float, ...] = ()  # of one sequence
    resident_answer_tokens: tuple[float, ...] = ()  # mean length of an answer, in tokens
    stolen: int = 0  # number of jobs of other models that the worker took since its start
    not_stolen: int = 0  # how often the worker saw jobs of other models and took none
    left: int = 0  # how often the worker left a job of its own model to a faster worker
    layout: str = ""  # layout of its KV caches, from `layout_text`; empty without KV transfer, and from older workers
    sketch: str = ""  # hexadecimal hash of its engine's sketch; empty if the engine has none, and from older workers
    refuses: tuple[str, ...] = ()  # decode workers only: sketches of the engines whose KV caches the worker refuses
    refuses_because: tuple[str, ...] = ()  # the reason for each sketch in `refuses`, as a sentence
    details: WorkerDetails = NO_DETAILS  # encoded separately (`kvstore.base.encoded`)

    def __post_init__(self) -> None:
        checks.identifier("worker_id", self.worker_id)
        checks.one_of("role", self.role, BOTH_ROLES)
        checks.model_name("model", self.model)
        for name in ("engine", "device", "fingerprint", "tokenizer", "host", "off", "sketch"):
            checks.text(name, getattr(self, name), 255)
        checks.text("notes", self.notes, 1024)
        checks.text("layout", self.layout, MAX_LAYOUT_BYTES)
        for name in ("context", "slots", "pid", "busy", "done", "stolen", "not_stolen", "left"):
            checks.whole(name, getattr(self, name), 0, 1 << 32)
        for name in ("started_at", "tokens_per_s", "chars_per_token"):
            checks.number(name, getattr(self, name), 0, _MAX_RATE)
        if not isinstance(self.jobs, tuple) or len(self.jobs) > 1024:
            raise InvalidMessage("'jobs' must hold at most 1,024 job ids")
        for job in self.jobs:
            checks.identifier("jobs", job)
        checks.instance("details", self.details, WorkerDetails)
        self._check_resident()
        self._check_refuses()

    def _check_refuses(self) -> None:
        columns = (self.refuses, self.refuses_because)
        if any(not isinstance(column, tuple) or len(column) != len(self.refuses) for column in columns):
            raise InvalidMessage("'refuses_because' must have a reason for each sketch in 'refuses'")
        if len(self.refuses) > MAX_REFUSALS:
            raise InvalidMessage(f"'refuses' must hold at most {MAX_REFUSALS} sketches")
        for sketch, reason in zip(*columns, strict=True):
            checks.text("refuses", sketch, 255)
            checks.text("refuses_because", reason, 1024)

    def _check_resident(self) -> None:
        columns = (self.resident_tokens_per_s, self.resident_answer_tokens)
        if not isinstance(self.resident, tuple) or len(self.resident) > 64:
            raise InvalidMessage("'resident' must hold at most 64 models")
        if any(not isinstance(column, tuple) or len(column) != len(self.resident) for column in columns):
            raise InvalidMessage("resident_tokens_per_s and resident_answer_tokens must hold a number for each model")
        for model in self.resident:
            checks.model_name("resident", model)
        for name, column in zip(("resident_tokens_per_s", "resident_answer_tokens"), columns, strict=True):
            for value in column:
                checks.number(name, value, 0, _MAX_RATE)

    @property
    def process(self) -> str:
        """What the registrations of one process share: `worker_id` without the suffix that a second role adds."""
        return self.worker_id.removesuffix(_PREFILL_SUFFIX)

    def why_refused(self, sketch: str) -> str:
        """Why this worker refuses KV caches from producers with this sketch; "": it does not, or there is no sketch."""
        return dict(zip(self.refuses, self.refuses_because, strict=True)).get(sketch, "") if sketch else ""

    def figures_for(self, model: str) -> tuple[float, float]:
        """(tokens a second of one sequence, mean tokens of an answer) for this model; 0 where unknown."""
        if model not in self.resident:
            return 0.0, 0.0
        place = self.resident.index(model)
        return self.resident_tokens_per_s[place], self.resident_answer_tokens[place]
