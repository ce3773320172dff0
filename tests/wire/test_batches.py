"""Which headers of records users see."""

from __future__ import annotations

from millstream.broker import dead_letter_values as values
from millstream.log.batch import LANE_HEADER
from millstream.wire.batches import (
    DEAD_PREFIX,
    REDRIVEN_HEADERS,
    TYPE_HEADER,
    is_shown_header,
)


def test_users_see_their_own_headers_and_what_became_of_a_record() -> None:
    assert all(map(is_shown_header, ("trace", "ms", "", values.REASON_HEADER, *REDRIVEN_HEADERS)))
    assert not any(map(is_shown_header, (TYPE_HEADER, LANE_HEADER, "ms-anything")))


def test_the_names_are_those_that_the_broker_writes() -> None:
    assert values.HEADER_PREFIX == DEAD_PREFIX
    assert {values.REDRIVES_HEADER, values.FIRST_TIME_HEADER} == REDRIVEN_HEADERS
