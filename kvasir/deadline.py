"""`--deadline`: a duration such as `8h` or `1h30m`, or a time of day on this machine's clock such as `07:30`."""

import re
from datetime import datetime, timedelta

import click

_TO_GO = re.compile(r"(?:(\d{1,3})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")
_TIME_OF_DAY = re.compile(r"(\d\d?):(\d\d)")
_EXPECTED = "must be a duration such as 8h, 90m or 1h30m, or a time of day such as 07:30"


def seconds_to(text: str, now: datetime) -> float:
    """Return the seconds from `now`. A time of day means its next occurrence.

    Raises ValueError with the expected form.
    """
    text = text.strip()
    if match := _TIME_OF_DAY.fullmatch(text):
        return _to_time_of_day(int(match[1]), int(match[2]), now)
    match = _TO_GO.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total_s = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    if not total_s:
        raise ValueError(f"{_EXPECTED}, not {text!r:.40}")
    return total_s


def _to_time_of_day(hour: int, minute: int, now: datetime) -> float:
    if hour > 23 or minute > 59:
        raise ValueError(f"{_EXPECTED}; there is no time {hour:02}:{minute:02}")
    moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if moment <= now:
        moment += timedelta(days=1)
    # computed with time zones, because a day on which the clocks change does not have 24 hours
    return (moment.astimezone() - now.astimezone()).total_seconds()


def _read(_context: click.Context, _option: click.Parameter, text: str | None) -> float:
    try:
        return seconds_to(text, datetime.now()) if text is not None else 0.0
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


deadline_option = click.option(
    "--deadline",
    "deadline_s",  # seconds from now; 0 if no deadline is given
    callback=_read,
    metavar="WHEN",
    help="Give up on jobs that are not done after this duration (8h, 90m) or by this time of day (07:30).",
)
