"""Times of a day, week and year, as cron says them, in a time zone.

    ┌ minute 0-59   ┌ day 1-31         ┌ weekday 0-7 or sun-sat; 0 and 7 are Sunday
    │  ┌ hour 0-23  │  ┌ month 1-12 or jan-dec
    30 7            *  *               mon-fri

A field is `*`, a number or name, a range, a list with commas, each with `/step` where wanted. When
day and weekday are both limited, either will do. `@hourly`, `@daily`, `@weekly`, `@monthly` and
`@yearly` are short for the obvious.

Summer time. A time that the clocks skip runs when they have gone forward. A time that comes twice
runs the first time. An hour that begins with `*` follows the clock instead: what is skipped is left
out, and what comes twice runs twice.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from millstream.errors import ScheduleInvalid

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day", 1, 31, {}),
    ("month", 1, 12, {name: at + 1 for at, name in enumerate(_MONTHS)}),
    ("weekday", 0, 7, {name: at for at, name in enumerate(_DAYS)}),
)
_SHORT = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
TEXT_MAX = 200
# The 29th of February comes at least every eight years.
_YEARS_MAX = 9
# Clocks are changed at quarters of an hour, all over the world.
_QUARTER = timedelta(minutes=15)
_MINUTE = timedelta(minutes=1)


class Cron(NamedTuple):
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    # Whether the hour begins with `*`.
    is_hourly: bool
    # Whether a day is right when one of day and weekday is.
    is_either: bool

    def next_ms(self, after_ms: int, zone: ZoneInfo) -> int | None:
        """The first time after a moment; None when there is none, as for 30 February."""
        start = datetime.fromtimestamp(after_ms // 60_000 * 60, UTC)
        time, end = start + _MINUTE, start + timedelta(days=366 * _YEARS_MAX)
        while time < end:
            local = time.astimezone(zone)
            if self._is_met(local) and (self.is_hourly or not local.fold):
                return _milliseconds(time)
            if not self.is_hourly and self._was_skipped(time, local, zone):
                return _milliseconds(time)
            time = self._step(time, local)
        return None

    def _is_met(self, local: datetime) -> bool:
        return local.minute in self.minutes and local.hour in self.hours and self._is_day(local)

    def _is_day(self, local: datetime) -> bool:
        if local.month not in self.months:
            return False
        is_day, is_weekday = local.day in self.days, local.isoweekday() % 7 in self.weekdays
        return is_day or is_weekday if self.is_either else is_day and is_weekday

    def _was_skipped(self, time: datetime, local: datetime, zone: ZoneInfo) -> bool:
        """Whether the clocks went forward just now, over a time that was meant."""
        if time.minute % 15:
            return False
        before = (time - _MINUTE).astimezone(zone).replace(tzinfo=None)
        now = local.replace(tzinfo=None)
        skipped = before + _MINUTE
        while skipped < now:
            if self._is_met(skipped):
                return True
            skipped += _MINUTE
        return False

    def _step(self, time: datetime, local: datetime) -> datetime:
        """To where it may be next: no clock is changed in between."""
        if self._is_day(local) and local.hour in self.hours:
            return time + _MINUTE
        quarter = time - timedelta(minutes=time.minute % 15) + _QUARTER
        if self._is_day(local) or local.hour >= 20:
            return quarter
        # Clocks are changed by three hours at most.
        return quarter + timedelta(hours=20 - local.hour)


def parse_cron(text: str) -> Cron:
    """ScheduleInvalid, which says what is wrong, for what is none."""
    words = _SHORT.get(text.strip().lower(), text)[:TEXT_MAX].lower().split()
    if len(words) != len(_FIELDS):
        raise ScheduleInvalid(
            f"cron is {text[:TEXT_MAX]!r}; it has 5 fields, minute hour day month weekday, or is "
            f"one of {', '.join(_SHORT)}"
        )
    minutes, hours, days, months, weekdays = (
        _field(word, *field) for word, field in zip(words, _FIELDS, strict=True)
    )
    cron = Cron(
        minutes,
        hours,
        days,
        months,
        frozenset(day % 7 for day in weekdays),
        is_hourly=words[1].startswith("*"),
        is_either=not words[2].startswith("*") and not words[4].startswith("*"),
    )
    if cron.next_ms(0, ZoneInfo("UTC")) is None:
        raise ScheduleInvalid(f"cron is {text!r}; there is no such day")
    return cron


def _field(word: str, name: str, least: int, most: int, names: dict[str, int]) -> frozenset[int]:
    found: set[int] = set()
    for part in word.split(","):
        span, slash, step_text = part.partition("/")
        first_text, dash, last_text = span.partition("-")
        try:
            step = int(step_text) if slash else 1
            if span == "*":
                first, last = least, most if name != "weekday" else 6
            else:
                first = names[first_text] if first_text in names else _number(first_text)
                last = first
                if dash:
                    last = names[last_text] if last_text in names else _number(last_text)
                    if name == "weekday" and last == 0 < first:
                        # A week that ends with its Sunday, such as mon-sun.
                        last = most
                elif slash:
                    last = most
            if step < 1 or not least <= first <= last <= most:
                raise ValueError
        except ValueError:
            raise ScheduleInvalid(
                f"{part!r} is no {name} in cron; take `*`, or {least} to {most}, a list, or a "
                "range that goes up"
            ) from None
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 2):
        raise ValueError
    return int(text)


def zone_of(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ScheduleInvalid(
            f"there is no time zone {name[:TEXT_MAX]!r}; take a name such as Europe/Berlin or UTC"
        ) from None


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp()) * 1000
