"""Which models stay in memory: as many as fit, loaded once, the least useful evicted, the home model never."""

from collections.abc import Callable, Iterator

import pytest

from decode_worker.stealing.models import CachedModel, LoadedModel, ModelCache, NotLoaded, Stealable, victims
from engines.base import LoadedEngine
from messages.errors import ConfigError
from tests.support.pipeline import WatchedEngine
from tests.support.waiting import wait_until


def holding(model: str, size: int = 10, used_at: float = 0, users: int = 0) -> CachedModel:
    return CachedModel(model, size, LoadedEngine(WatchedEngine()), users, used_at)


@pytest.mark.parametrize(
    ("cached", "waiting_s", "needed", "going"),
    [
        ([], {}, 0, []),
        ([holding("a")], {}, 0, []),
        ([holding("a")], {}, 5, ["a"]),
        ([holding("a"), holding("b")], {}, 15, ["a", "b"]),
        ([holding("a"), holding("b")], {"a": 9, "b": 3}, 5, ["b"]),  # the least work goes first
        ([holding("a", used_at=2), holding("b", used_at=1)], {}, 5, ["b"]),  # then the one unused for longest
        ([holding("a", users=1), holding("b")], {"b": 3}, 5, ["b"]),
        ([holding("a", users=1)], {}, 5, None),
        ([holding("a")], {"a": 50}, 5, None),  # it has more work than the newcomer's 50 s
        ([holding("a", size=3)], {}, 5, None),
        ([], {}, 5, None),
    ],
)
def test_the_least_useful_models_make_room_or_none_does(cached, waiting_s, needed, going):
    assert victims(cached, needed, "new", {"new": 50, **waiting_s}) == going


class Shelf:
    """Three models that could be loaded, ten bytes each, and what became of them."""

    def __init__(self, memory_bytes: int) -> None:
        self.loads: list[str] = []
        self.closed: list[str] = []
        others = [Stealable(name, 10, self._loader(name)) for name in ("a", "b", "big")]
        others[-1] = Stealable("big", 1000, self._loader("big"))
        home = CachedModel("home", 10, LoadedEngine(self._engine("home")))
        self.model_cache = ModelCache(home, others, memory_bytes)

    def load(self, model: str, **waiting_s: float) -> bool:
        begun = self.model_cache.load(model, waiting_s)
        if begun:
            wait_until(lambda: not self.model_cache._loader or not self.model_cache._loader.is_alive(), "it has loaded")
        return begun

    def _loader(self, name: str) -> Callable[[], LoadedModel]:
        def load() -> LoadedModel:
            self.loads.append(name)
            if name == "b" and self.loads.count("b") == 1 and self.fails:
                raise ConfigError("the file is not there")
            return LoadedEngine(self._engine(name))

        return load

    fails = False

    def _engine(self, name: str) -> WatchedEngine:
        engine = WatchedEngine()
        close = engine.close

        def closing() -> None:
            self.closed.append(name)
            close()

        engine.close = closing  # type: ignore[method-assign]
        return engine


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """Room for the home model and one more."""
    shelf = Shelf(memory_bytes=25)
    yield shelf
    shelf.model_cache.close()


def test_a_model_is_loaded_once_and_kept(shelf):
    assert shelf.load("a", a=10)
    assert not shelf.load("a", a=10)
    assert shelf.loads == ["a"]
    assert shelf.model_cache.resident() == ["home", "a"]


def test_a_model_that_can_never_fit_is_no_candidate(shelf):
    assert shelf.model_cache.candidates() == ["a", "b"]


def test_a_more_useful_model_takes_the_place_of_a_less_useful_one_but_never_of_the_home_model(shelf):
    shelf.load("a", a=10)
    assert not shelf.load("b", a=10, b=5)
    assert shelf.load("b", a=0, b=5)
    assert shelf.model_cache.resident() == ["home", "b"]
    assert shelf.closed == ["a"]


def test_a_model_with_a_job_in_a_slot_is_not_evicted(shelf):
    shelf.load("a", a=10)
    with shelf.model_cache.job("a"):
        assert not shelf.load("b", b=5)
    assert shelf.load("b", b=5)


def test_without_a_bound_all_are_kept():
    shelf = Shelf(memory_bytes=0)
    for model in ("a", "b", "big"):
        assert shelf.load(model)
    assert shelf.model_cache.resident() == ["home", "a", "b", "big"]
    shelf.model_cache.close()
    assert (shelf.model_cache.resident(), shelf.closed) == (["home"], ["a", "b", "big"])


def test_a_model_that_can_not_be_loaded_is_left_alone_for_a_while(shelf):
    shelf.fails = True
    shelf.load("b", b=5)
    assert shelf.model_cache.candidates() == ["a"]
    assert shelf.model_cache.resident() == ["home"]


def test_a_load_is_guessed_from_its_size_until_it_was_measured_and_costs_nothing_once_it_is_there(shelf):
    assert shelf.model_cache.load_s("big") == pytest.approx(1000 / 1e9)
    shelf.load("a")
    assert shelf.model_cache.load_s("a") == 0


def test_a_job_of_a_model_that_is_not_in_memory_is_told_so(shelf):
    with pytest.raises(NotLoaded), shelf.model_cache.job("a"):
        pass
