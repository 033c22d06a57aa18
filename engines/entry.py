"""An engine's entry: everything it says about itself before a model is loaded.

An engine is a package with one entry, which its distribution names in the entry-point group `kvasir.engines`. Settings,
`kvasir doctor`, `kvasir engines`, deployment and the reference page read it. So the entry's module must not import
packages that may be missing.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs

from engines.base import Capabilities, DecodeEngine, PrefillEngine
from messages import checks
from messages.errors import ConfigError, InvalidMessage

MEND_TRANSFER = "choose an engine that transfers KV: kvasir engines"
MEND_DEVICE = "install the {device} build of what {engine} runs on there"


class Engine(PrefillEngine, DecodeEngine, Protocol):
    """An engine that can both prefill and decode. Each worker uses one of the two protocols."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. Each engine defines what `weights` means: a file, a folder or a URL."""

    weights: str
    context: int = 0  # maximum number of tokens; 0: as many as the model was trained for
    slots: int = 4  # how many sequences the engine decodes at once
    threads: int = 0  # number of CPU threads; 0: the engine chooses
    allow_external: bool = False  # whether prompts are allowed to go to a server outside private networks
    api_key: str = field(default="", repr=False)  # the key for a server that requires one
    prefill_slots: int = 1  # how many prompts the engine prefills in one batch, if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine. A loaded model may support less than `capabilities`, so its worker proves the KV transfer when it
    starts."""

    name: str
    module: str  # the module that has `open_engine(options)`; it is imported when a model is loaded
    capabilities: Capabilities
    weights: str  # the forms that the setting `weights.NAME` can have, joined by ", "

    # How the value of `weights.NAME` is read.
    # "path": as a path, unless it has a scheme. A relative path starts from the folder of the kvasir.toml that has it.
    # "path or hub name": the same, except that OWNER/NAME is a model on the hub if there is no such path.
    # "text": never as a path.
    weights_type: Literal["path", "path or hub name", "text"] = "path"
    weights_text: str = ""  # text for docs/reference/configuration.md; if empty, it is made from `weights`
    takes_api_key: bool = False
    packages: tuple[str, ...] = ()  # Python packages that the engine imports
    extra: str = ""  # the pip extra of Kvasir that installs `packages`
    family: str = ""  # engines of one family can read each other's KV caches if the weights are the same
    note: str = ""  # shown by `kvasir engines`
    has_slot_files: bool = False  # whether the engine writes slot files, which need room in shared memory

    # What `kvasir doctor` advises for a worker that transfers no KV cache, and for one that doesn't use the GPU.
    mend_transfer: str = MEND_TRANSFER
    mend_device: str = MEND_DEVICE

    @property
    def meaning(self) -> str:
        """The meaning of the setting `weights.NAME`, in Markdown."""
        return self.weights_text or ", ".join(f"`{form}`" for form in self.weights.split(", "))

    def transfers_to(self, other: "EngineEntry") -> bool:
        """Whether `other` can decode from KV caches that this engine prefilled."""
        return self.capabilities.exports_kv and other.capabilities.imports_kv and other.family == self.family

    def install_command(self, weights: str = "") -> str:
        """The command that installs what the engine needs to load `weights`; "" if nothing is missing."""
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if not absent:
            return ""
        return f"pip install 'kvasir-inference[{self.extra}]'" if self.extra else f"pip install {' '.join(absent)}"

    def check(self, options: EngineOptions) -> tuple[str, str]:
        """For `kvasir doctor`, without loading the model: what was found, and what to do about it ("": nothing).

        Raises ConfigError for weights that can't be loaded.
        """
        return f"{self.name} can load {options.weights}", ""

    def open_engine(self, options: EngineOptions) -> Engine:
        """Load a model. Raises ConfigError with what to do if a package or the weights are missing."""
        try:
            module: Any = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            command = self.install_command() or f"pip install {error.name}"
            raise ConfigError(f"engine {self.name!r} needs the package {error.name!r}: run {command}") from error
        try:
            checks.readable("weights", options.weights)
        except InvalidMessage as error:
            raise ConfigError(str(error)) from None
        if (slots := min(options.slots, options.prefill_slots)) < 1:
            raise ConfigError(f"slots must be at least 1, not {slots}")
        engine: Engine = module.open_engine(options)
        return engine


@contextmanager
def closed_on_failure(opened: Any) -> Iterator[None]:
    """A context for building on an opened engine. If the block fails, the engine is closed."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def options_in(weights: str, query: str, *names: str) -> dict[str, str]:
    """The options after the `?` in weights. Only `names` are allowed. Raises ConfigError."""
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    if unknown := set(options) - {*names}:
        raise ConfigError(f"weights {weights!r}: unknown option {unknown.pop()!r}; use {' or '.join(map(repr, names))}")
    return options
