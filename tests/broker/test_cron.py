"""When cron says: fields, time zones, and the nights when clocks are changed."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from millstream.broker.cron import parse_cron, zone_of
from millstream.errors import ScheduleInvalid


def runs(text: str, zone: str, after: str, count: int = 3) -> list[str]:
    """The next times in a zone, with their offset from UTC."""
    tz = ZoneInfo(zone)
    cron = parse_cron(text)
    at = int(datetime.fromisoformat(after).replace(tzinfo=tz).timestamp() * 1000)
    found: list[str] = []
    for _ in range(count):
        following = cron.next_ms(at, tz)
        assert following is not None
        assert following > at
        at = following
        found.append(datetime.fromtimestamp(at / 1000, tz).strftime("%Y-%m-%d %H:%M %z"))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("* * * * *", ["2026-01-01 00:01", "2026-01-01 00:02"]),
        ("*/15 * * * *", ["2026-01-01 00:15", "2026-01-01 00:30"]),
        ("30 7 * * mon-fri", ["2026-01-01 07:30", "2026-01-02 07:30", "2026-01-05 07:30"]),
        ("0 0 1,15 * *", ["2026-01-15 00:00", "2026-02-01 00:00"]),
        ("0 12 29 2 *", ["2028-02-29 12:00", "2032-02-29 12:00"]),
        ("0 0 13 * fri", ["2026-01-02 00:00", "2026-01-09 00:00", "2026-01-13 00:00"]),
        ("0 0 * * sat-sun", ["2026-01-03 00:00", "2026-01-04 00:00", "2026-01-10 00:00"]),
        ("0 0 * * mon-sun", ["2026-01-02 00:00", "2026-01-03 00:00", "2026-01-04 00:00"]),
        ("0 0 * * 5-0/2", ["2026-01-02 00:00", "2026-01-04 00:00", "2026-01-09 00:00"]),
        ("5 4 * jun-AUG/2 7", ["2026-06-07 04:05", "2026-06-14 04:05"]),
        ("10-30/10 1 * * *", ["2026-01-01 01:10", "2026-01-01 01:20", "2026-01-01 01:30"]),
        ("@hourly", ["2026-01-01 01:00", "2026-01-01 02:00"]),
        ("@weekly", ["2026-01-04 00:00", "2026-01-11 00:00"]),
        ("@yearly", ["2027-01-01 00:00", "2028-01-01 00:00"]),
    ],
)
def test_the_next_times_are_those_that_the_fields_say(text: str, expected: list[str]) -> None:
    found = runs(text, "UTC", "2026-01-01T00:00:00", len(expected))
    assert [one.removesuffix(" +0000") for one in found] == expected


def test_a_time_that_the_clocks_skip_runs_when_they_have_gone_forward() -> None:
    assert runs("30 2 * * *", "Europe/Berlin", "2026-03-28T03:00:00") == [
        "2026-03-29 03:00 +0200",
        "2026-03-30 02:30 +0200",
        "2026-03-31 02:30 +0200",
    ]


def test_a_time_that_comes_twice_runs_once() -> None:
    assert runs("30 2 * * *", "Europe/Berlin", "2026-10-24T03:00:00", 2) == [
        "2026-10-25 02:30 +0200",
        "2026-10-26 02:30 +0100",
    ]


def test_an_hour_that_begins_with_a_star_follows_the_clock() -> None:
    assert runs("30 */2 * * *", "Europe/Berlin", "2026-03-29T00:00:00", 2) == [
        "2026-03-29 00:30 +0100",
        "2026-03-29 04:30 +0200",
    ]
    assert runs("30 */2 * * *", "Europe/Berlin", "2026-10-25T01:00:00") == [
        "2026-10-25 02:30 +0200",
        "2026-10-25 02:30 +0100",
        "2026-10-25 04:30 +0100",
    ]


def test_what_runs_each_hour_runs_in_both_of_an_hour_that_comes_twice() -> None:
    assert runs("30 * * * *", "Europe/Berlin", "2026-10-25T01:00:00", 4) == [
        "2026-10-25 01:30 +0200",
        "2026-10-25 02:30 +0200",
        "2026-10-25 02:30 +0100",
        "2026-10-25 03:30 +0100",
    ]


def test_half_an_hour_of_summer_time_is_known_too() -> None:
    assert runs("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T03:00:00", 2) == [
        "2026-10-04 02:30 +1100",
        "2026-10-05 02:15 +1100",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *",
     "* * * * 8", "5-1 * * * *", "*/0 * * * *", "a * * * *", "1- * * * *", "-1 * * * *",
     "0 0 30 2 *", "@never", "٣ * * * *"],
)  # fmt: skip
def test_what_is_no_cron_is_refused(text: str) -> None:
    with pytest.raises(ScheduleInvalid):
        parse_cron(text)


@pytest.mark.parametrize("name", ["", "Nowhere/At_All", "../../etc/passwd", "/etc/passwd", "a\0b"])
def test_a_time_zone_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ScheduleInvalid):
        zone_of(name)
