"""Ctrl-C while a command is still importing, which takes most of a second: it exits without a traceback."""

import os
import signal

EXIT_INTERRUPTED = 130


def leave_quietly() -> None:
    """Exit quietly on Ctrl-C until `interrupt` is called, while nothing needs cleaning up.

    An ignored signal stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: object) -> None:
    os._exit(EXIT_INTERRUPTED)  # no exception is raised, because a callback during an import could swallow it
