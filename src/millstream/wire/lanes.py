"""Lanes by their names and numbers, and how a record says which one it is of.

A lane is one of five words, from the most urgent to the least, or its number, 0 to 4. A record of
another lane than normal has the header `ms-lane`, and its batch the same in its attributes.
"""

from __future__ import annotations

from millstream.errors import LaneUnknown
from millstream.log.batch import LANE_HEADER, LANES, Headers

NORMAL = LANES.index("normal")
_NUMBERS = tuple(map(str, range(len(LANES))))
# Of a bad word, what is said back.
SHOWN_MAX = 40

__all__ = [
    "LANES",
    "LANE_HEADER",
    "NORMAL",
    "lane_headers",
    "lane_name",
    "lane_of_word",
    "lane_unknown",
]


def lane_of_word(word: str | int) -> int:
    """The lane of a name, or of one of the numbers 0 to 4."""
    if isinstance(word, str) and word in LANES:
        return LANES.index(word)
    number = int(word) if isinstance(word, int) or word in _NUMBERS else -1
    if not 0 <= number < len(LANES):
        raise lane_unknown(word)
    return number


def lane_headers(headers: Headers, lane: int) -> Headers:
    """Headers of a record, with the one that names its lane; normal is not named."""
    return headers if lane == NORMAL else (*headers, (LANE_HEADER, LANES[lane].encode()))


def lane_name(lane: int) -> str | None:
    """What a batch of that lane says of it; of none, as that of schedules is, nothing."""
    return None if lane == NORMAL or lane < 0 else LANES[lane]


def lane_unknown(word: str | int, at: int | None = None) -> LaneUnknown:
    error = LaneUnknown(
        f"there is no lane {str(word)[:SHOWN_MAX]!r}; take one of {', '.join(LANES)}, or its "
        f"number, 0 to {len(LANES) - 1}",
        lane=str(word)[:SHOWN_MAX],
    )
    if at is not None:
        error.fields["record"] = at
    return error
