"""The models that a decode worker holds: always its own, and stolen ones while they pay and the memory allows."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engines.base import DecodeEngine, LoadedEngine
from messages.errors import KvasirError, Stopped

log = logging.getLogger(__name__)

# Assumed speed of reading weights from disk. It is used until a model has been loaded.
FIRST_LOAD_BYTES_PER_S = 1e9
# A model that could not be loaded is tried again after this time. By then its file can have changed, or the workers of
# that model can have loaded other weights.
_BARRED_S = 600.0


class NotLoaded(Stopped):
    """A job came for a model that is not in memory."""


LoadedModel = LoadedEngine[DecodeEngine]


@dataclass(frozen=True, slots=True)
class Stealable:
    """A model that this worker may serve in addition to its own.

    Attributes:
        size_bytes: what it takes in memory; 0: next to nothing.
        load: loads it. Raises KvasirError if that fails, or if its weights differ from those of its own workers.
    """

    model: str
    size_bytes: int
    load: Callable[[], LoadedModel]


@dataclass
class CachedModel:
    """A model in memory. `users` is the number of its jobs in slots; it is not evicted while there are any."""

    model: str
    size_bytes: int
    loaded_model: LoadedModel
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)


def victims(
    cached: Iterable[CachedModel], needed_bytes: int, new_model: str, waiting_s: Mapping[str, float]
) -> list[str] | None:
    """Return the models to evict so that `needed_bytes` become free; None if not enough can be freed.

    The least useful goes first: the one with the least work waiting, then the one that was not used for the longest
    time. A model that is in use, or has as much work waiting as the new one, stays. A pure function.
    """
    models = []
    for resident in sorted(cached, key=lambda resident: (waiting_s.get(resident.model, 0.0), resident.used_at)):
        if needed_bytes <= 0:
            break
        if not resident.users and waiting_s.get(resident.model, 0.0) < waiting_s.get(new_model, 0.0):
            models.append(resident.model)
            needed_bytes -= resident.size_bytes
    return models if needed_bytes <= 0 else None


class ModelCache:
    """The models in memory. `get`, `load` and `job` may be called from any thread; loading has its own thread.

    `memory_bytes` limits the weights of all models together, the home model's included; 0: no limit.
    """

    def __init__(self, home: CachedModel, stealable_models: Sequence[Stealable] = (), memory_bytes: int = 0) -> None:
        self.home = home
        self._stealable = {stealable.model: stealable for stealable in stealable_models}
        self.models = (home.model, *self._stealable)  # all models that this worker is allowed to load
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._cached = {home.model: home}
        self._barred_until: dict[str, float] = {}  # monotonic clock
        self._load_s: dict[str, float] = {}
        self._loader: threading.Thread | None = None

    def resident(self) -> list[str]:
        """Return the models in memory, the home model first."""
        with self._lock:
            return list(self._cached)

    def get(self, model: str) -> LoadedModel | None:
        """Return the model if it is in memory, or None."""
        with self._lock:
            cached = self._cached.get(model)
            return cached.loaded_model if cached else None

    @contextmanager
    def job(self, model: str) -> Iterator[LoadedModel]:
        """Keep a model in memory for the length of the block. Raises NotLoaded."""
        with self._lock:
            cached = self._cached.get(model)
            if cached is None:
                raise NotLoaded(model)
            cached.users += 1
        try:
            yield cached.loaded_model
        finally:
            with self._lock:
                cached.users -= 1
                cached.used_at = time.monotonic()

    def candidates(self) -> list[str]:
        """Return the other models that may be stolen from now: those in memory, and those that could be loaded."""
        with self._lock:
            now = time.monotonic()
            most_bytes = self._memory_bytes - self.home.size_bytes if self._memory_bytes else math.inf
            return [
                model
                for model, stealable in self._stealable.items()
                if model in self._cached
                or (self._barred_until.get(model, 0.0) < now and stealable.size_bytes <= most_bytes)
            ]

    def load_s(self, model: str) -> float:
        """Return how long loading will take, as measured, or estimated from its size; 0 if it is in memory."""
        with self._lock:
            if model in self._cached:
                return 0.0
            return self._load_s.get(model, self._stealable[model].size_bytes / FIRST_LOAD_BYTES_PER_S)

    def load(self, model: str, waiting_s: Mapping[str, float]) -> bool:
        """Make room for a model and begin to load it in the background. Returns False if that can't be done now.

        `waiting_s`: seconds of work that wait, by model, including this one.
        """
        with self._lock:
            if model in self._cached or (self._loader and self._loader.is_alive()):
                return False
            victim_names = self._choose_victims(self._stealable[model], waiting_s)
            if victim_names is None:
                return False
            evicted_models = [self._cached.pop(name) for name in victim_names]
            self._loader = threading.Thread(
                target=self._exchange,
                args=(self._stealable[model], evicted_models),
                name=f"loading {model}",
                daemon=True,
            )
            self._loader.start()
        return True

    def close(self) -> None:
        """Wait for a load in progress, and unload all models but the home model, which its owner unloads."""
        if self._loader:
            self._loader.join()
        with self._lock:
            stolen_models = [cached for cached in self._cached.values() if cached is not self.home]
            self._cached = {self.home.model: self.home}
        for cached in stolen_models:
            cached.loaded_model.engine.close()

    def _choose_victims(self, stealable: Stealable, waiting_s: Mapping[str, float]) -> list[str] | None:
        if not self._memory_bytes:
            return []
        used_bytes = sum(cached.size_bytes for cached in self._cached.values())
        stolen_models = [cached for cached in self._cached.values() if cached is not self.home]
        needed_bytes = used_bytes + stealable.size_bytes - self._memory_bytes
        return victims(stolen_models, needed_bytes, stealable.model, waiting_s)

    def _exchange(self, stealable: Stealable, evicted_models: list[CachedModel]) -> None:
        for cached in evicted_models:
            log.info("unloading %s to make room for %s", cached.model, stealable.model)
            cached.loaded_model.engine.close()
        start = time.monotonic()
        try:
            loaded_model = stealable.load()
        except Exception as error:
            if not isinstance(error, KvasirError):
                log.error("bug while loading %s", stealable.model, exc_info=error)
            log.warning("%s will not be stolen for the next %.0f minutes: %s", stealable.model, _BARRED_S / 60, error)
            with self._lock:
                self._barred_until[stealable.model] = time.monotonic() + _BARRED_S
            return
        took_s = time.monotonic() - start
        log.info("loaded %s in %.1f s, to steal its jobs", stealable.model, took_s)
        with self._lock:
            self._load_s[stealable.model] = took_s
            self._cached[stealable.model] = CachedModel(stealable.model, stealable.size_bytes, loaded_model)
