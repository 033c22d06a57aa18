"""When a connection that says nothing any more is dead: after a heartbeat and a half, or a heartbeat and 5 s."""

from __future__ import annotations

from pika.heartbeat import HeartbeatChecker  # type: ignore[import-untyped]

_LOOKS = 8


class PatientListener(HeartbeatChecker):  # type: ignore[misc]
    """Looks eight times in that while, and gives up when it has heard nothing at any of them.

    pika 1.4 looks once in a heartbeat and 5 s, so that it may take two of those to see a dead connection. Looks are
    counted, not seconds: a process that was stopped, or had no processor, first reads what came meanwhile.
    """

    @property
    def connection_is_idle(self) -> bool:
        """Whether it is taken for dead."""
        return bool(self._idle_byte_intervals >= _LOOKS)

    def _start_check_timer(self) -> None:
        self._check_interval = (self._timeout + min(5.0, self._timeout / 2)) / _LOOKS
        super()._start_check_timer()
