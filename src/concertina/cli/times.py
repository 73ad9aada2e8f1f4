"""Times as people write them, to absolute ones and back. Pure: the present and its time zone are arguments.

2h  90s  1h30m  2 days          so long from now
18:00                           today, or tomorrow if that has passed
today 18:00  tomorrow 9:00
2026-12-01T18:00[+01:00|Z]      as it stands; without a zone, the one of the person who asks
"""

import math
import re
from datetime import UTC, date, datetime, time, timedelta

from concertina.core.errors import UsageError

FORMS = "2h, 90s, 1h30m, 18:00, tomorrow 9:00 or 2026-12-01T18:00"
MOST_DAYS = 3660  # a deadline further away than ten years is a slip of the pen
DAY, HOUR, MINUTE = 86400, 3600, 60

_UNITS = {"d": DAY, "day": DAY, "h": HOUR, "hour": HOUR, "hr": HOUR, "m": MINUTE, "min": MINUTE, "minute": MINUTE}
_UNITS |= {"s": 1, "sec": 1, "second": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*(?:and\s+)?")
_CLOCK = re.compile(r"(?:(today|tomorrow)\s+(?:at\s+)?)?(\d{1,2}):(\d{2})(?::(\d{2}))?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def parse_time(text: str, now: datetime) -> float:
    """Seconds since 1970. `now` knows its zone. Raises UsageError with one sentence."""
    if now.tzinfo is None:
        raise ValueError("the present needs a time zone")
    plain = " ".join(text.lower().split())
    if found := _CLOCK.fullmatch(plain):
        at = _clock(text, found, now)
    elif _DATE.match(plain):
        at = _calendar(text, now)
    else:
        at = now.timestamp() + _duration(text, plain)
    if at <= now.timestamp():
        raise UsageError(f"the time {text!r} is not in the future: it is {now:%Y-%m-%d %H:%M:%S} now")
    if at > now.timestamp() + MOST_DAYS * DAY:
        raise UsageError(f"the time {text!r} is more than ten years away; write it as {FORMS}")
    return at


def parse_duration(text: str) -> float:
    """Seconds in `2h`, `90s`, `1h30m`; always more than 0."""
    return _duration(text, " ".join(text.lower().split()))


def _duration(text: str, plain: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", plain):
        raise UsageError(f"{text!r} has no unit; write {plain}s, {plain}m, {plain}h or {plain}d")
    seconds, at, last = 0.0, 0, math.inf
    for part in _PART.finditer(plain):
        unit = _unit(part[2])
        if part.start() != at or unit is None:
            break
        if unit >= last:
            raise UsageError(f"{text!r} has its units out of order; write it as 1h30m")
        seconds, at, last = seconds + float(part[1]) * unit, part.end(), unit
    if at != len(plain) or not plain:
        raise UsageError(f"{text!r} is no time; write it as {FORMS}")
    if seconds <= 0:
        raise UsageError(f"{text!r} is no time at all; write it as {FORMS}")
    return seconds


def _unit(word: str) -> int | None:
    return _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))


def _clock(text: str, found: re.Match[str], now: datetime) -> float:
    word, hour, minute, second = found[1], int(found[2]), int(found[3]), int(found[4] or 0)
    if hour > 23 or minute > 59 or second > 59:
        raise UsageError(f"{text!r} is no time of day; the last one is 23:59")
    clock = time(hour, minute, second)
    day = now.date() + timedelta(days=word == "tomorrow")
    at = _at(text, day, clock, now)
    if word is None and at <= now.timestamp():
        at = _at(text, day + timedelta(days=1), clock, now)
    return at


def _calendar(text: str, now: datetime) -> float:
    stripped = text.strip()
    if _DATE.fullmatch(stripped):
        raise UsageError(f"{text!r} is a whole day; add the time of day, as in {stripped}T18:00")
    try:
        at = datetime.fromisoformat(stripped.upper())
    except ValueError:
        raise UsageError(
            f"{text!r} is no date and time; write it as 2026-12-01T18:00 or 2026-12-01T18:00+01:00"
        ) from None
    try:
        return at.timestamp() if at.tzinfo is not None else _at(text, at.date(), at.time(), now)
    except OverflowError:  # the first and the last days of the calendar have no time in every zone
        raise UsageError(f"{text!r} is too far away; write it as {FORMS}") from None


def _at(text: str, day: date, clock: time, now: datetime) -> float:
    """A time on the wall of whoever asks. One that the clocks jump over in spring is none; of one that comes twice in
    autumn the next is meant."""
    for fold in (0, 1):
        at = datetime.combine(day, clock.replace(fold=fold), tzinfo=now.tzinfo)
        if at.astimezone(UTC).astimezone(now.tzinfo).replace(tzinfo=None) != at.replace(tzinfo=None):
            raise UsageError(f"{text!r} does not exist in your time zone: the clocks are put forward over it")
        if at.timestamp() > now.timestamp():
            break
    return at.timestamp()


# -- and back ---------------------------------------------------------------------------------------------------------


def lasting(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 05 min`, `3 d 4 h`: short enough for a table."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / MINUTE)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(whole / HOUR)
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def at_clock(at: float, now: datetime) -> str:
    """`18:00:05`, `tomorrow 09:00` or `2026-12-01 18:00`, in the zone of `now`."""
    there = datetime.fromtimestamp(at, now.tzinfo)
    if there.date() == now.date():
        return f"{there:%H:%M:%S}"
    if there.date() == now.date() + timedelta(days=1):
        return f"tomorrow {there:%H:%M}"
    return f"{there:%Y-%m-%d %H:%M}"


def ago_or_ahead(at: float, now: float) -> str:
    """`in 12 min` or `3 s ago`."""
    return f"in {lasting(at - now)}" if at >= now else f"{lasting(now - at)} ago"
