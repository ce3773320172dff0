"""How clients say when: a delay, or a time.

A delay is milliseconds, or a number with a unit: `500ms`, `30s`, `5m`, `24h`, `7d`. A time is
milliseconds since 1970, or a date and time as ISO 8601 has them; without a zone it is UTC.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from millstream.errors import DelayInvalid

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DELAY = re.compile(r"([0-9]{1,15})(ms|s|m|h|d)?", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,18}", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Of a bad word, what is said back.
_SHOWN_MAX = 40
# Beyond every calendar; below it nothing overflows.
MS_MAX = 10**18


def delay_ms_of(word: str | float) -> int:
    """A delay in milliseconds; part of one rounds up."""
    if isinstance(word, str):
        match = _DELAY.fullmatch(word)
        if match is not None:
            return int(match[1]) * _UNITS_MS[match[2] or "ms"]
    elif 0 <= word <= MS_MAX:
        return math.ceil(word)
    raise DelayInvalid(
        f"{_shown(word)} is no delay; take milliseconds, or a text such as 500ms, 30s, 5m, 24h, 7d"
    )


def time_ms_of(word: str | float) -> int:
    """A time in milliseconds since 1970; part of one rounds up."""
    if not isinstance(word, str):
        if 0 <= word <= MS_MAX:
            return math.ceil(word)
    elif _WHOLE.fullmatch(word):
        return int(word)
    else:
        try:
            moment = datetime.fromisoformat(word)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            since = moment - _EPOCH
            microseconds = (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds
            return max(0, -(-microseconds // 1000))
        except (ValueError, OverflowError):
            pass
    raise DelayInvalid(
        f"{_shown(word)} is no time; take milliseconds since 1970, or a text such as "
        "2026-01-31T08:00:00Z"
    )


def _shown(word: str | float) -> str:
    return repr(word)[:_SHOWN_MAX]
