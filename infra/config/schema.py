"""Every table of kvasir.toml as a frozen dataclass, with each key's type, limits and default.

pydantic checks each source by these annotations (`infra.config.sources`), and the values are stored in these classes.
The classes used in the annotations are ours: with pydantic's own, every command would have to import pydantic, even one
that reads no settings.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from infra.config import urls
from infra.config.hours import Hours
from messages import checks
from messages.errors import InvalidMessage
from messages.installed import engine_names
from messages.jobs import KV_CHECK_EVERY, MAX_TOKENS, SHORT_PROMPT_TOKENS
from messages.urls import STORE_SCHEMES
from messages.workers import BOTH_ROLES, RateCurve, WorkerStage

Supervisor = Literal["launchd", "plain", "systemd"]

PLATFORMS = ("linux", "linux-cuda", "macos")
SUPERVISORS: tuple[Supervisor, ...] = ("launchd", "plain", "systemd")
WORKER_ROLES = ("decode", "prefill", "worker")
ROLES = (*WORKER_ROLES, "app", "broker", "gateway", "grafana", "prometheus", "store")
SAMPLING = ("max_tokens", "temperature", "top_p")

Points = tuple[tuple[float, float], ...]

# Characters that could add a line to a unit file, or make the file invalid.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Must:
    """What a value must be: pairs of a description for people and a schema for pydantic-core, applied in order."""

    def __init__(self, *steps: tuple[str, Mapping[str, object]]) -> None:
        self._steps = steps

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> dict[str, Any]:
        steps = [
            {"type": "custom-error", "schema": schema, "custom_error_type": "must", "custom_error_message": words}
            for words, schema in self._steps
        ]
        return {"type": "chain", "steps": steps}


@dataclass(frozen=True, slots=True)
class TextCheck:
    """A text that must pass one of our checks. The check is called with "" as the name, and raises InvalidMessage."""

    check: Callable[[str, str], None]

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self._run},
            "schema": handler(source),
        }

    def _run(self, value: str) -> str:
        try:
            self.check("", value)
        except InvalidMessage as error:
            raise ValueError(error) from None  # pydantic collects ValueErrors, but not InvalidMessage
        return value


def _whole(low: int, high: int) -> Must:
    return Must((f"a whole number from {low:,} to {high:,}", {"type": "int", "strict": True, "ge": low, "le": high}))


def _number(low: float, high: float) -> Must:
    finite = {"type": "float", "strict": True, "allow_inf_nan": False}
    return Must(("a number", finite), (f"from {low:g} to {high:g}", {"type": "float", "ge": low, "le": high}))


def _form(words: str, pattern: str) -> Must:
    return Must((words, {"type": "str", "pattern": f"^(?:{pattern})$"}))


def _one_of(*words: str) -> Must:
    return Must((f"one of {', '.join(sorted(filter(None, words)))}", {"type": "literal", "expected": list(words)}))


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """The name of an installed engine, or one of `others`. The engines are looked up when settings are read."""

    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, Any]:
        return _one_of(*self.others, *engine_names()).__get_pydantic_core_schema__(source, handler)


@dataclass(frozen=True, slots=True)
class CurvePoints:
    """Pairs of numbers: sequences or prompt tokens, in ascending order, and tokens a second."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, Any]:
        return {"type": "function-plain", "function": {"type": "no-info", "function": self._read}}

    def _read(self, value: Any) -> Points:
        try:
            points = tuple((at, rate) for at, rate in value)
            RateCurve("curve", *zip(*points, strict=True))
            if not all(rate for _, rate in points):
                raise ValueError("a rate must be above 0")
        except (TypeError, ValueError, InvalidMessage):
            raise ValueError(
                f" must be pairs in ascending order such as [[1, 51], [4, 80]], not {value!r:.60}"
            ) from None
        return points


def _text(name: str, value: str) -> None:
    """Check that a text is not longer than anyone would write on purpose."""
    checks.text(name, value, 4096)


def _line(name: str, value: str) -> None:
    _text(name, value)
    if CONTROL.search(value):
        raise InvalidMessage(f"{name} must be one line without control characters, not {value!r:.60}")


def _place(name: str, value: str) -> None:
    """Check a file, or the place of weights. It must be one line without a password, since it is shown and logged."""
    if urls.may_hold_password(value) and not value.startswith(("ollama:", "llama-server:")):
        raise InvalidMessage(f"{name} must not contain a password, because Kvasir shows and logs {name}")
    _line(name, value)
    checks.readable(name, value)


def _model_or_none(name: str, value: str) -> None:
    if value:
        checks.model_name(name, value)


def _hours(name: str, value: str) -> None:
    checks.text(name, value, 200)
    Hours.parse(name, value)


Place = Annotated[str, TextCheck(_place)]
ModelName = Annotated[str, TextCheck(checks.model_name)]
ModelOrNone = Annotated[str, TextCheck(_model_or_none)]
BrokerUrl = Annotated[str, TextCheck(lambda name, value: urls.check(name, value, urls.BROKER_SCHEMES))]
StoreUrl = Annotated[str, TextCheck(lambda name, value: urls.check(name, value, STORE_SCHEMES))]
Engine = Annotated[str, InstalledEngine()]
EngineOrNone = Annotated[str, InstalledEngine(("",))]
# No value begins with a dash or has spaces, because ssh gets host and user as arguments, and shell commands contain the
# folder.
Host = Annotated[str, _form("a host name or an address", r"[A-Za-z0-9][A-Za-z0-9.:_\-]{0,252}")]
User = Annotated[str, _form("a user's login name", r"|[A-Za-z_][A-Za-z0-9._\-]{0,63}")]
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._\-]{0,252}|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
Hosts = Annotated[str, _form("hosts with commas between them, such as fast:5672,slow:5672", rf"|{_HOST}(?:,{_HOST})*")]
Folder = Annotated[
    str, _form("a folder, absolute or relative to the user's home", r"/?[A-Za-z0-9_.][A-Za-z0-9_./\-]{0,200}")
]
Tokens = Annotated[int, _whole(1, MAX_TOKENS)]
TokensOrNone = Annotated[int, _whole(0, MAX_TOKENS)]
Temperature = Annotated[float, _number(0, 5)]
Share = Annotated[float, _number(0, 1)]
Slots = Annotated[int, _whole(1, 1024)]
Amount = Annotated[float, _number(0, 1e6)]
Rate = Annotated[float, _number(0, 1e9)]
Curve = Annotated[Points, CurvePoints()]


@dataclass(frozen=True, slots=True)
class ServiceTable:
    """Where the broker and the store are; "" and `local` mean in this process."""

    broker: BrokerUrl = ""
    store: StoreUrl = ""
    broker_password_file: Place = ""
    store_password_file: Place = ""
    broker_ca_file: Place = ""  # PEM file of the CA that signed the broker's certificate; if empty, the system's CAs
    store_ca_file: Place = ""
    broker_nodes: Slots = 1  # number of nodes in the RabbitMQ cluster


@dataclass(frozen=True, slots=True)
class Grading:
    """Which models grade, and how they sample unless their own table says otherwise."""

    code_model: ModelOrNone = ""
    feedback_model: ModelOrNone = ""
    notice: Annotated[str, TextCheck(_text)] = (
        ""  # a text at the top of every report; in the demo, it says that the grades are not real
    )
    max_tokens: Tokens = 3000  # this default and the next two are those of Kvasir's predecessor
    temperature: Temperature = 0.2
    top_p: Share = 0.9
    max_submission_tokens: TokensOrNone = 0  # maximum tokens of a submission in a prompt; 0: as many as fit


@dataclass(frozen=True, slots=True)
class Costs:
    """What electricity costs, and over how much use the machines' prices are spread. The currency doesn't matter."""

    price_per_kwh: Amount = 0.0  # 0: unknown
    years: Annotated[float, _number(0.1, 100)] = 4.0  # for how many years a machine is in use
    hours_per_week: Annotated[float, _number(0.1, 168)] = 40.0  # how many hours a week a machine is in use


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model that has queues. `weights` maps an engine to a file, a folder, or another name that it can load."""

    context: TokensOrNone = 0  # maximum tokens of prompt and answer together; 0: as many as the model was trained for
    max_tokens: Tokens = 3000
    temperature: Temperature = 0.2
    top_p: Share = 0.9
    engine: EngineOrNone = ""  # the engine if no other is requested; if empty, the only engine that has weights
    slots: Slots = 4
    prefill_slots: Slots = 8
    # number of CPU threads; 0: the engine chooses
    threads: Annotated[int, _whole(0, 1024)] = 0
    # Prompts up to this length skip the prefill worker, and the decode worker computes them.
    short_prompt_tokens: TokensOrNone = SHORT_PROMPT_TOKENS
    # The decode worker checks every n-th KV cache by computing the prompt itself; 0: never.
    kv_check_every: Annotated[int, _whole(0, 1_000_000)] = KV_CHECK_EVERY
    free_memory_gb: Amount = 0.0  # how much memory a prefill must leave free; 0: this is not checked
    # Copies of the model in one process. With two copies, prefill and decode never share a batch.
    copies: Annotated[int, _whole(1, 2)] = 1
    tokenizer: Annotated[str, TextCheck(_line)] = ""
    same_weights: tuple[Engine, ...] = ()  # these engines load the same weights, so they can exchange KV caches
    kv_bytes_per_token: Annotated[int, _whole(0, 1 << 40)] = 0  # bytes of KV cache per token, for planning; 0: unknown
    kv_state_bytes: Annotated[int, _whole(0, 1 << 40)] = 0  # size of the recurrent layers' state, for planning
    memory_gb: Amount = 0.0  # size of the model's weights, for planning; 0: unknown
    allow_external: bool = False  # whether prompts are allowed to go to a server outside private networks
    api_key_file: Place = ""  # file with the API key for the openai or vllm engine; KVASIR_API_KEY overrides it
    weights: Mapping[Engine, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineRole:
    """One thing that runs on a machine: a worker, or a service."""

    role: Annotated[str, _one_of(*ROLES)]
    model: ModelOrNone = ""
    engine: EngineOrNone = ""
    weights: Place = ""  # path of the weights on this machine; if empty, the path in the model's table is used
    slots: Slots = 0  # number of slots; 0: the number in the model's table is used
    memory_gb: Amount = 0.0  # memory that a store is allowed to use; 0: Kvasir sets no limit
    port: Annotated[int, _whole(1, 65535)] = 8000  # port of a gateway

    def __post_init__(self) -> None:
        for key in ("model", "engine") if self.role in WORKER_ROLES else ():
            if not getattr(self, key):
                raise ValueError(f": a {self.kind} needs {key!r}")

    @property
    def stages(self) -> tuple[WorkerStage, ...]:
        """The stages of a worker; empty for a service."""
        if self.role == "worker":
            return BOTH_ROLES
        return tuple(stage for stage in BOTH_ROLES if stage == self.role)

    @property
    def kind(self) -> str:
        """A description for people: `prefill worker`, `worker with both roles`."""
        return "worker with both roles" if self.role == "worker" else f"{self.role} worker"


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one model on one machine, for planning; 0: unknown. A curve is preferred to a single rate."""

    prefill: Rate = 0.0
    decode: Rate = 0.0  # rate of one sequence while all other slots are busy
    prefill_curve: Curve = ()
    decode_curve: Curve = ()

    def of(self, stage: str) -> Points | float:
        """Return the curve of `prefill` or `decode`, or the single rate if there is no curve."""
        prefill, decode = self.prefill_curve or self.prefill, self.decode_curve or self.decode
        return prefill if stage == "prefill" else decode


@dataclass(frozen=True, slots=True)
class MachineTable:
    """A machine: how to reach it, what it can do, and what runs there. 0 means unknown."""

    host: Host = ""
    user: User = ""  # login name for ssh; if empty, the name of the user who deploys
    platform: Annotated[str, _one_of(*PLATFORMS)] = "linux"
    # the folder for everything that `kvasir deploy` installs: an absolute path, or a path relative to the user's home
    folder: Folder = "kvasir"
    # if empty, the platform's default supervisor is used
    supervisor: Annotated[str, _one_of("", *SUPERVISORS)] = ""
    # Port of the first worker's metrics page; the other workers get the next ports.
    metrics_port: Annotated[int, _whole(1, 65535)] = 9101
    broker_hosts: Hosts = ""  # the broker's hosts, best first; they replace the hosts in the broker's URL
    store_hosts: Hosts = ""
    # The hours in which the machine's workers take jobs, such as 18:00-08:00. If empty, they always take jobs.
    hours: Annotated[str, TextCheck(_hours)] = ""
    memory_gb: Amount = 0.0
    link_gbps: Annotated[float, _number(0, 1e5)] = 0.0  # speed of the link to the store's machine, Gbit/s
    watts: Annotated[float, _number(0, 1e5)] = 0.0  # under load
    price: Annotated[float, _number(0, 1e9)] = 0.0  # purchase price, in the currency of [costs]
    roles: tuple[MachineRole, ...] = ()
    rates: Mapping[ModelName, Rates] = field(default_factory=dict)  # by model


@dataclass(frozen=True, slots=True)
class File:
    """The tables of kvasir.toml, or the same tables from another source."""

    # With this attribute, Pydantic refuses unknown keys, here and in the inner tables.
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    services: ServiceTable = field(default_factory=ServiceTable)
    grading: Grading = field(default_factory=Grading)
    costs: Costs = field(default_factory=Costs)
    models: Mapping[ModelName, ModelTable] = field(default_factory=dict)
    machines: Mapping[Annotated[str, TextCheck(checks.identifier)], MachineTable] = field(default_factory=dict)


# Maps the path of each table to its class. The paths contain no names of models or machines.
TABLES: Mapping[str, type] = {
    "": File,
    "services": ServiceTable,
    "grading": Grading,
    "costs": Costs,
    "models": ModelTable,
    "machines": MachineTable,
    "machines.roles": MachineRole,
    "machines.rates": Rates,
}


def keys_of(table: str) -> list[str]:
    """Return the keys of a table, in the order of the documentation."""
    return list(engine_names()) if table == "models.weights" else [each.name for each in fields(TABLES[table])]


def nearest(name: str, names: Collection[str]) -> str:
    """Return the known name that this name may be a misspelling of; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(names), 1, 0.6)), "")


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return the end of a sentence about an unknown name: the most similar known name, or all of them."""
    if close := nearest(name, names):
        return f"did you mean {close!r}?"
    return f"known: {', '.join(sorted(names))}" if names else "none is known"
