"""Dead letters listed, looked at, counted and deleted."""

from __future__ import annotations

import pytest

from broker.burying import bury, house_of, left, listed, make, redrive, values_of
from broker.making import House
from millstream.broker import dead_letter_reading
from millstream.broker.dead_letter_reading import LIST_MAX
from millstream.errors import (
    DeadLetterUnknown,
    ParameterInvalid,
    PartitionUnknown,
    TopicUnknown,
)
from millstream.log.partition import PartitionId


@pytest.fixture
def house() -> House:
    return house_of()


def test_a_letter_says_why_and_where_from(house: House) -> None:
    bury(house, "a", partition=1, lane="high", error="no such account")
    [letter] = listed(house).letters
    assert (letter.partition, letter.record.offset, letter.lane) == (1, 0, "high")
    assert letter.facts == ("orders", 1, 0, "billing", 4, "deliveries", "no such account",
                            8_900, 9_000, 0)  # fmt: skip
    got = house.done(house.broker.dead_letter_reading.get("orders", 1, 0))
    assert got == letter


def test_pages_go_on_where_the_one_before_ended(house: House) -> None:
    bury(house, *"abcde", partition=0)
    bury(house, *"fgh", partition=1)
    found: list[str] = []
    at: tuple[int, int] | None = (0, 0)
    sizes = []
    while at is not None:
        page = listed(house, count_max=3, at=at)
        found += values_of(page.letters)
        sizes.append(len(page.letters))
        at = page.next
        assert page.total == 8
    assert found == list("abcdefgh")
    assert sizes == [3, 3, 2]


def test_one_partition_can_be_listed_alone(house: House) -> None:
    bury(house, *"ab", partition=0)
    bury(house, *"cd", partition=1)
    assert left(house, partition=1) == ["c", "d"]
    assert listed(house, partition=0, count_max=2).next is None
    error = house.failed(
        house.broker.dead_letter_reading.list(
            "orders", dead_letter_reading.LetterFilter(), partition=2
        )
    )
    assert isinstance(error, PartitionUnknown)


def test_a_page_that_found_nothing_says_where_to_go_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_reading, "SCAN_RECORDS", 100)
    monkeypatch.setattr(dead_letter_reading, "SCAN_STEP", 50)
    bury(house, *(f"v{n}" for n in range(250)))
    page = listed(house, text="v249")
    assert (page.letters, page.next) == ([], (0, 100))
    page = listed(house, text="v249", at=(0, 200))
    assert (values_of(page.letters), page.next) == (["v249"], None)


def test_a_page_is_bounded_by_bytes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_reading, "LIST_BYTES_MAX", 100)
    bury(house, *("x" * 60 for _ in range(5)))
    page = listed(house)
    assert (len(page.letters), page.next) == (2, (0, 2))


def test_a_limit_is_kept_and_one_past_it_is_refused(house: House) -> None:
    bury(house, "a")
    listed(house, count_max=LIST_MAX)
    for wrong in (0, LIST_MAX + 1):
        error = house.failed(
            house.broker.dead_letter_reading.list(
                "orders", dead_letter_reading.LetterFilter(), count_max=wrong
            )
        )
        assert isinstance(error, ParameterInvalid)


def test_what_is_deleted_is_gone_and_the_rest_stays(house: House) -> None:
    bury(house, *"abcd")
    house.done(house.broker.dead_letter_reading.delete("orders", [(0, 1), (0, 3)]))
    assert left(house) == ["a", "c"]
    assert listed(house).total == 2
    for offset in (1, 3, 4):
        error = house.failed(house.broker.dead_letter_reading.get("orders", 0, offset))
        assert isinstance(error, DeadLetterUnknown)


def test_deleting_one_that_is_not_there_deletes_none(house: House) -> None:
    bury(house, *"ab")
    reading = house.broker.dead_letter_reading
    for places in ([(0, 0), (0, 2)], [(0, 0), (9, 0)], [(0, -1)]):
        assert isinstance(house.failed(reading.delete("orders", places)), DeadLetterUnknown)
    assert left(house) == ["a", "b"]
    house.done(reading.delete("orders", [(0, 0)]))
    assert isinstance(house.failed(reading.delete("orders", [(0, 0)])), DeadLetterUnknown)
    for places in ([], [(0, 1)] * (dead_letter_reading.DELETE_MAX + 1)):
        assert isinstance(house.failed(reading.delete("orders", places)), ParameterInvalid)


def test_what_is_gone_at_the_front_is_trimmed_and_its_marks_forgotten(house: House) -> None:
    bury(house, *(f"v{n}" for n in range(5_000)))
    house.done(house.broker.dead_letter_reading.delete("orders", [(0, 4_999)]))
    id = PartitionId("orders.dlq", 0)
    assert house.engine.offsets(id) == (0, 5_000)
    house.done(house.broker.dead_letter_reading.delete("orders", [(0, 0), (0, 1)]))
    assert house.engine.offsets(id) == (2, 5_000)
    assert listed(house).total == 4_997
    redrive(house)
    assert house.engine.offsets(id) == (5_000, 5_000)
    view = house.broker.dead_letter_reading._marks.view
    [chunk] = [key for key, _ in view.entries() if key[:1] == b"g"]
    assert chunk[-1] == 1


def test_a_purge_removes_all_and_forgets_the_marks(house: House) -> None:
    bury(house, *(f"v{n}" for n in range(5_000)))
    house.done(house.broker.dead_letter_reading.delete("orders", [(0, 7)]))
    house.done(house.broker.dead_letter_reading.purge("orders"))
    assert listed(house).total == 0
    assert not [key for key, _ in house.broker.dead_letter_reading._marks.view.entries()]
    bury(house, "new")
    assert left(house) == ["new"]


def test_dead_letters_made_again_inherit_no_marks(house: House) -> None:
    bury(house, *"abc")
    house.done(house.broker.dead_letter_reading.delete("orders", [(0, 1)]))
    house.done(house.broker.topics.delete("orders.dlq"))
    assert not [key for key, _ in house.broker.dead_letter_reading._marks.view.entries()]
    bury(house, *"xyz")
    assert left(house) == ["x", "y", "z"]


def test_topics_are_counted_that_have_some(house: House) -> None:
    make(house, "empty")
    make(house, "mail")
    bury(house, *"abc")
    bury(house, *"de", topic="mail")
    bury(house, "x", topic="empty")
    house.done(house.broker.dead_letter_reading.delete("empty", [(0, 0)]))
    counts = house.done(house.broker.dead_letter_reading.counts())
    assert counts == [("mail", "mail.dlq", 2), ("orders", "orders.dlq", 3)]


def test_a_topic_that_is_gone_still_has_its_dead_letters(house: House) -> None:
    bury(house, "a")
    house.done(house.broker.topics.delete("orders"))
    assert left(house) == ["a"]
    assert left(house, "orders.dlq") == ["a"]


def test_a_topic_without_any_has_an_empty_list_and_an_unknown_one_has_none(house: House) -> None:
    assert listed(house).letters == []
    reading = house.broker.dead_letter_reading
    error = house.failed(reading.list("nowhere", dead_letter_reading.LetterFilter()))
    assert isinstance(error, TopicUnknown)
    house.done(reading.purge("orders"))
    assert isinstance(house.failed(reading.get("orders", 0, 0)), DeadLetterUnknown)


def test_facts_that_somebody_wrote_by_hand_do_no_harm(house: House) -> None:
    headers = (
        ("ms-dead-offset", b"9" * 30),
        ("ms-dead-partition", b"-1"),
        ("ms-dead-reason", b"\xff"),
        ("ms-dead-group", None),
        ("ms-redrives", b"many"),
    )
    bury(house, "a")
    house.done(house.broker.publisher.publish_one("orders.dlq", None, None, headers, None, 0))
    letter = listed(house).letters[1]
    assert letter.facts == (None, None, None, None, None, "\ufffd", None, None, None, 0)
