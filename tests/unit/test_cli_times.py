"""Times as people write them: what is meant, what is refused, and the way back."""

import contextlib
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina.cli.times import ago_or_ahead, at_clock, lasting, parse_duration, parse_time
from concertina.core.errors import UsageError

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 16, 17, 30, tzinfo=BERLIN)
moments = st.datetimes(datetime(2025, 1, 1), datetime(2035, 1, 1), timezones=st.just(BERLIN))


def meant(text: str, now: datetime = NOW) -> datetime:
    return datetime.fromtimestamp(parse_time(text, now), now.tzinfo)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90s", 90),
        ("1h30m", 5400),
        ("1h 30min", 5400),
        ("2 days", 172800),
        ("1.5h", 5400),
        ("1d2h3m4s", 93784),
        ("10 MIN", 600),
        ("1 hour and 5 minutes", 3900),
    ],
)
def test_a_duration_counts_from_now(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_time(text, NOW) == NOW.timestamp() + seconds


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("18:00", "2026-11-16T18:00"),
        ("17:00", "2026-11-17T17:00"),
        ("17:30", "2026-11-17T17:30"),  # now is not in the future
        ("9:05:30", "2026-11-17T09:05:30"),
        ("today 18:00", "2026-11-16T18:00"),
        ("tomorrow 9:00", "2026-11-17T09:00"),
        ("tomorrow at 18:00", "2026-11-17T18:00"),
        ("2026-12-01T18:00", "2026-12-01T18:00"),
        ("2026-12-01 18:00", "2026-12-01T18:00"),
        ("2026-12-01T18:00Z", "2026-12-01T19:00"),
        ("2026-12-01T18:00-05:00", "2026-12-02T00:00"),
        ("2027-07-01T18:00", "2027-07-01T18:00"),  # summer time there, winter time now
    ],
)
def test_a_time_of_day_is_the_next_one_where_the_user_is(text: str, when: str) -> None:
    assert meant(text) == datetime.fromisoformat(when).replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("30", "'30' has no unit; write 30s, 30m, 30h or 30d"),
        ("", "is no time; write it as"),
        ("soon", "'soon' is no time; write it as 2h"),
        ("2h later", "is no time"),
        ("-2h", "is no time"),
        ("0s", "no time at all"),
        ("30m1h", "out of order"),
        ("25:00", "no time of day"),
        ("today 9:00", "not in the future"),
        ("2020-01-01T00:00", "not in the future: it is 2026-11-16 17:30:00 now"),
        ("2026-12-01", "is a whole day; add the time of day, as in 2026-12-01T18:00"),
        ("2026-13-01T18:00", "is no date and time"),
        ("9999d", "more than ten years"),
        ("99999999999999999999999d", "more than ten years"),
        ("2027-03-28T02:30", "does not exist in your time zone"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_hint(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_time(text, NOW)


def test_a_duration_is_not_changed_by_clocks_that_are_put_forward() -> None:
    before = datetime(2027, 3, 28, 1, 30, tzinfo=BERLIN)
    assert parse_time("2h", before) - before.timestamp() == 7200


@pytest.mark.parametrize("text", ["2:30", "today 2:30", "2026-10-25T02:30"])
@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_that_comes_twice_in_autumn_is_the_next_one(text: str, fold: int) -> None:
    now = datetime(2026, 10, 25, 2, 10, fold=fold, tzinfo=BERLIN)
    assert parse_time(text, now) - now.timestamp() == 20 * 60


@pytest.mark.parametrize("text", ["0001-01-01T00:00", "0001-01-01T00:00+14:00", "9999-12-31T23:59-12:00"])
def test_the_ends_of_the_calendar_are_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match=r"too far away|not in the future|more than ten years"):
        parse_time(text, NOW)


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), moments)
def test_any_sum_of_units_is_understood(days: int, hours: int, minutes: int, seconds: int, now: datetime) -> None:
    total = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    text = f"{days}d{hours}h {minutes}m{seconds}s"
    if total == 0:
        with pytest.raises(UsageError):
            parse_duration(text)
    else:
        assert parse_time(text, now) == now.timestamp() + total


@given(st.integers(0, 23), st.integers(0, 59), moments)
def test_a_bare_clock_is_within_the_next_day(hour: int, minute: int, now: datetime) -> None:
    now = now.astimezone(UTC)
    at = parse_time(f"{hour}:{minute:02d}", now)
    assert 0 < at - now.timestamp() <= 86400
    there = datetime.fromtimestamp(at, UTC)
    assert (there.hour, there.minute, there.second) == (hour, minute, 0)


@given(st.floats(61, 300 * 86400), moments)
def test_what_is_shown_can_be_typed_again(ahead: float, now: datetime) -> None:
    now = now.astimezone(UTC)
    at = now.timestamp() + ahead
    assert abs(parse_time(at_clock(at, now), now) - at) < 60


@given(st.text(max_size=20), moments)
def test_any_text_is_a_time_to_come_or_refused(text: str, now: datetime) -> None:
    with contextlib.suppress(UsageError):
        assert parse_time(text, now) > now.timestamp()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (-5, "0 s"),
        (99.4, "99 s"),
        (100, "2 min"),
        (5400, "90 min"),
        (7500, "2 h 05 min"),
        (90000, "25 h 00 min"),
        (200000, "2 d 8 h"),
    ],
)
def test_a_span_in_words(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


def test_before_and_after_in_words() -> None:
    assert (ago_or_ahead(100, 50), ago_or_ahead(50, 100)) == ("in 50 s", "50 s ago")
