"""Whether a prefill worker's KV caches are of use to anybody, as the decode workers' registrations say.

Computing and storing what every decoder will not use costs each prompt twice. Such a job goes on without a KV cache,
with the decoders' own reason, until one of them takes it or another decoder comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.base import ClusterState

LOOK_EVERY_S = 3.0


class Refusals:
    """What the decode workers of one model make of one sketch. Callable from any thread."""

    def __init__(
        self, cluster_state: ClusterState, model: str, sketch: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster_state = cluster_state
        self._model = model
        self._sketch = sketch
        self._clock = clock
        self._next_look = 0.0
        self._why = ""

    def why(self) -> str:
        """Why all of them refuse it, in the words of one; "": there is none yet, or one that does not refuse it.

        As of at most LOOK_EVERY_S ago.
        """
        now = self._clock()
        if self._sketch and now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            whys = [
                each.why_refused(self._sketch)
                for each in self._cluster_state.registrations()
                if each.role == "decode" and each.model == self._model
            ]
            self._why = whys[0] if whys and all(whys) else ""
        return self._why
