"""Ctrl-C while a command is still importing, for most of a second: it ends as later on, instead of with a traceback."""

import os
import signal

EXIT_INTERRUPTED = 130


def leave_quietly() -> None:
    """Used until `interrupt` is called, while there is nothing to clean up. An ignored signal stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: object) -> None:
    os._exit(EXIT_INTERRUPTED)  # no exception: a callback of the imports would swallow it
