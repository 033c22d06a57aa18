"""`kvasir` as the harness starts it: SIGUSR1 steps this process's clock by KVASIR_CLOCK_STEP_S seconds.

The step is an offset inside this process (`time.time`, and so the timestamps of its log); the monotonic clock goes on,
as it does when NTP or a person sets a machine's clock.
"""

import os
import signal
import time

from kvasir import cli

_real_time = time.time
_offset_s = 0.0


def _step(_number: int, _frame: object) -> None:
    global _offset_s
    _offset_s += float(os.environ.get("KVASIR_CLOCK_STEP_S", "0"))


def main() -> None:
    """Install the clock, then be `kvasir`."""
    time.time = lambda: _real_time() + _offset_s
    signal.signal(signal.SIGUSR1, _step)
    cli.main()


if __name__ == "__main__":
    main()
