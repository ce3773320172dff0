"""What every engine promises: appending, reading, waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engine.engines import T0, T1, House, all_values, finish, read_all
from log.making import NOW_MS, Sender, batch, header_of, offsets, records, split, values
from millstream.errors import (
    AppendTooLarge,
    BatchChecksumMismatch,
    BatchCountInvalid,
    BatchLengthInvalid,
    BatchMagicUnsupported,
    BatchTooLarge,
    EngineStopped,
    MillstreamError,
    OffsetOutOfRange,
    PartitionUnknown,
    ProducerFenced,
    SequenceDuplicate,
    SequenceOutOfOrder,
    TopicUnknown,
)
from millstream.log import batch as batches
from millstream.log.partition import PartitionId, PartitionSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.engine.pending import Pending


def refused(house: House, pending: Pending[int]) -> type[BaseException]:
    with pytest.raises(MillstreamError) as caught:
        house.done(pending)
    return caught.type


# ---- appending


def test_batches_get_offsets_one_after_the_other(topic: House) -> None:
    given = [batch(b"a", b"b"), batch(b"c"), batch(b"d", b"e", b"f")]
    assert finish(topic, [topic.engine.append(T0, one) for one in given]) == [0, 2, 3]
    assert topic.engine.offsets(T0) == (0, 6)
    assert all_values(topic) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_partitions_count_their_own_offsets(topic: House) -> None:
    assert topic.done(topic.engine.append(T0, batch(b"a", b"b"))) == 0
    assert topic.done(topic.engine.append(T1, batch(b"c"))) == 0
    assert (topic.engine.offsets(T0).high_watermark, topic.engine.offsets(T1).high_watermark) == (
        2,
        1,
    )


def test_the_bytes_of_a_batch_stay_as_they_came_but_for_its_place(topic: House) -> None:
    given = batch(b"a", key=b"k", compression="zstd")
    topic.done(topic.engine.append(T0, batch(b"first")))
    topic.done(topic.engine.append(T0, given))
    [(header, stored)] = split(topic.done(topic.engine.read(T0, 1, 1 << 20)).data)
    assert bytes(stored[16:]) == given[16:]
    assert (header.base_offset, header.length) == (1, header_of(given).length)


def test_a_header_that_was_verified_is_not_verified_again(topic: House) -> None:
    given = batch(b"a")
    header = batches.verify(given, bytes_max=len(given))
    assert topic.done(topic.engine.append(T0, given, header)) == 0
    assert all_values(topic) == [b"a"]


def test_nothing_is_to_be_seen_before_the_answer(topic: House) -> None:
    pending = topic.engine.append(T0, batch(b"a"))
    assert not pending.is_done
    assert topic.engine.offsets(T0) == (0, 0)
    assert not len(topic.engine.read(T0, 0, 1 << 20).result().data)
    assert topic.done(pending) == 0
    assert topic.engine.offsets(T0) == (0, 1)


def test_a_callback_may_append(topic: House) -> None:
    more: list[Pending[int]] = []
    first = topic.engine.append(T0, batch(b"a"))
    first.then(lambda _: more.append(topic.engine.append(T0, batch(b"b"))))
    topic.done(first)
    assert finish(topic, more) == [1]


WRONG: list[tuple[str, Callable[[bytes], bytes], type[MillstreamError]]] = [
    ("empty", lambda _: b"", BatchLengthInvalid),
    ("cut", lambda good: good[:-1], BatchLengthInvalid),
    ("longer", lambda good: good + b"\0", BatchLengthInvalid),
    ("flipped", lambda good: good[:-1] + bytes([good[-1] ^ 1]), BatchChecksumMismatch),
    ("magic", lambda good: good[:16] + b"\1" + good[17:], BatchMagicUnsupported),
    ("large", lambda _: batch(bytes(2 << 20)), BatchTooLarge),
]


@pytest.mark.parametrize(("change", "error"), [row[1:] for row in WRONG], ids=[r[0] for r in WRONG])
def test_a_wrong_batch_is_refused_and_nothing_is_kept(
    topic: House, change: Callable[[bytes], bytes], error: type[MillstreamError]
) -> None:
    wrong = change(batch(b"a", b"b"))
    assert refused(topic, topic.engine.append(T0, wrong)) is error
    with pytest.raises(error):
        topic.done(topic.engine.append_atomic([(T0, batch(b"good")), (T1, wrong)]))
    assert topic.engine.offsets(T0) == topic.engine.offsets(T1) == (0, 0)
    assert topic.done(topic.engine.append(T0, batch(b"a"))) == 0


def test_a_batch_that_lost_records_is_refused(topic: House) -> None:
    hole = batches.retain(batch(b"a", b"b", b"c"), {0, 2})
    assert hole is not None
    assert refused(topic, topic.engine.append(T0, hole)) is BatchCountInvalid


def test_a_batch_of_the_largest_size_is_taken_and_one_byte_more_is_not(house: House) -> None:
    given = batch(b"x" * 100)
    house.done(house.engine.create("t", 1, PartitionSettings(batch_bytes_max=len(given))))
    assert house.done(house.engine.append(T0, given)) == 0
    assert refused(house, house.engine.append(T0, batch(b"x" * 101))) is BatchTooLarge


def test_topics_and_partitions_that_do_not_exist_have_their_own_errors(topic: House) -> None:
    engine = topic.engine
    for id, error in (
        (PartitionId("u", 0), TopicUnknown),
        (PartitionId("t", 2), PartitionUnknown),
        (PartitionId("t", -1), PartitionUnknown),
    ):
        assert refused(topic, engine.append(id, batch(b"a"))) is error
        pendings: list[Pending[Any]] = [
            engine.append_atomic([(T0, batch(b"a")), (id, batch(b"a"))]),
            engine.read(id, 0, 1),
            engine.wait(id, 0),
            engine.find(id, 0),
            engine.trim(id, 0),
        ]
        for pending in pendings:
            with pytest.raises(error):
                topic.done(pending)
        with pytest.raises(error):
            engine.offsets(id)
    assert engine.offsets(T0) == (0, 0)


# ---- atomic appends


def test_an_atomic_append_gives_an_offset_for_each_batch(topic: House) -> None:
    topic.done(topic.engine.append(T1, batch(b"before")))
    entries = [(T0, batch(b"a", b"b")), (T1, batch(b"c")), (T0, batch(b"d"))]
    assert topic.done(topic.engine.append_atomic(entries)) == [0, 1, 2]
    assert all_values(topic, T0) == [b"a", b"b", b"d"]
    assert all_values(topic, T1) == [b"before", b"c"]


def test_an_atomic_append_of_nothing_is_done_at_once(topic: House) -> None:
    assert topic.engine.append_atomic([]).result() == []


def test_an_atomic_append_is_refused_as_a_whole(topic: House) -> None:
    sender = Sender(7)
    topic.done(topic.engine.append(T1, batch(b"a", sender=sender)))
    late = batch(b"c", sender=Sender(7, sequence=5))
    fresh = batch(b"b", sender=Sender(8))
    with pytest.raises(SequenceOutOfOrder):
        topic.done(topic.engine.append_atomic([(T0, fresh), (T1, late)]))
    assert topic.engine.offsets(T0) == (0, 0)
    # The refused part is not remembered either: it is no repeat when it comes again.
    assert topic.done(topic.engine.append(T0, batch(b"other"))) == 0
    assert topic.done(topic.engine.append(T0, fresh)) == 1


def test_what_follows_a_refused_atomic_append_in_its_turn_is_not_touched(topic: House) -> None:
    engine = topic.engine
    topic.done(engine.append(T1, batch(b"a", sender=Sender(7))))
    before = engine.append(T0, batch(b"before"))
    wrong = engine.append_atomic(
        [(T0, batch(b"b")), (T1, batch(b"c", sender=Sender(7, sequence=9)))]
    )
    after = engine.append(T0, batch(b"after"))
    assert topic.done(before) == 0
    assert topic.done(after) == 1
    assert isinstance(wrong.error, SequenceOutOfOrder)
    assert all_values(topic) == [b"before", b"after"]


def test_an_atomic_append_past_the_largest_frame_is_refused(house: House) -> None:
    house.done(house.engine.create("t", 1, PartitionSettings(batch_bytes_max=40 << 20)))
    half = batch(bytes(33 << 20))
    with pytest.raises(AppendTooLarge):
        house.done(house.engine.append_atomic([(T0, half), (T0, half)]))
    assert house.engine.offsets(T0) == (0, 0)


# ---- idempotent producers


def test_a_repeated_batch_is_stored_once_and_gets_its_first_offset(topic: House) -> None:
    first, second = batch(b"a", b"b", sender=Sender(7)), batch(b"c", sender=Sender(7, sequence=2))
    pendings = [topic.engine.append(T0, one) for one in (first, second, first, second)]
    assert finish(topic, pendings) == [0, 2, 0, 2]
    assert topic.done(topic.engine.append(T0, first)) == 0
    assert all_values(topic) == [b"a", b"b", b"c"]


def test_a_repeat_waits_until_its_original_is_answered(topic: House) -> None:
    data = batch(b"a", sender=Sender(7))
    original, repeat = topic.engine.append(T0, data), topic.engine.append(T0, data)
    order: list[str] = []
    original.then(lambda _: order.append("original"))
    repeat.then(lambda _: order.append("repeat"))
    assert not repeat.is_done
    finish(topic, [original, repeat])
    assert order == ["original", "repeat"]


def test_an_atomic_append_that_is_repeated_is_stored_once(topic: House) -> None:
    entries = [(T0, batch(b"a", sender=Sender(7))), (T1, batch(b"b", sender=Sender(7)))]
    topic.done(topic.engine.append(T1, batch(b"before")))
    assert topic.done(topic.engine.append_atomic(entries)) == [0, 1]
    assert topic.done(topic.engine.append_atomic(entries)) == [0, 1]
    assert topic.engine.offsets(T0) == (0, 1)
    assert topic.engine.offsets(T1) == (0, 2)


def test_wrong_sequences_and_old_epochs_are_refused(topic: House) -> None:
    engine = topic.engine
    for sequence in range(7):
        topic.done(engine.append(T0, batch(b"a", sender=Sender(7, sequence=sequence))))
    gap = batch(b"a", sender=Sender(7, sequence=8))
    assert refused(topic, engine.append(T0, gap)) is SequenceOutOfOrder
    old = batch(b"a", sender=Sender(7, sequence=1))
    assert refused(topic, engine.append(T0, old)) is SequenceDuplicate
    assert topic.done(engine.append(T0, batch(b"a", sender=Sender(7, epoch=1)))) == 7
    fenced = batch(b"a", sender=Sender(7, sequence=7))
    assert refused(topic, engine.append(T0, fenced)) is ProducerFenced
    assert engine.offsets(T0) == (0, 8)


def test_control_batches_have_a_producer_and_no_sequence(topic: House) -> None:
    marker = batch(b"", key=b"\0\0\0\1", sender=Sender(7, sequence=-1), control=True)
    assert finish(topic, [topic.engine.append(T0, marker) for _ in range(3)]) == [0, 1, 2]


def test_producer_ids_are_given_once(topic: House) -> None:
    ids = finish(topic, [topic.engine.producer_id() for _ in range(2500)])
    assert len(set(ids)) == 2500
    assert min(ids) >= 0


def test_producer_ids_that_are_asked_for_in_answers_are_given_once_too(topic: House) -> None:
    asked: list[Pending[int]] = []

    first = [topic.engine.producer_id() for _ in range(1000)]
    for pending in first:
        pending.then(lambda _: asked.append(topic.engine.producer_id()))
    ids = [*finish(topic, first), *finish(topic, asked)]
    assert len(ids) == len(set(ids)) == 2000


# ---- reading


def test_a_read_gives_whole_batches_from_the_one_that_holds_the_offset(topic: House) -> None:
    given = [batch(*(b"%d" % n for n in range(3))) for _ in range(20)]
    finish(topic, [topic.engine.append(T0, one) for one in given])
    size = len(given[0])
    for offset in range(60):
        for bytes_max in (1, size - 1, size, size + 1, 3 * size, 5 * size - 1, 1 << 20):
            chunk = topic.done(topic.engine.read(T0, offset, bytes_max))
            found = split(chunk.data)
            assert found[0][0].base_offset == offset - offset % 3
            assert found[-1][0].next_offset == chunk.next_offset
            assert len(chunk.data) <= max(bytes_max, size)


def test_at_the_high_watermark_there_is_nothing_and_past_it_an_error(topic: House) -> None:
    topic.done(topic.engine.append(T0, batch(b"a", b"b")))
    chunk = topic.done(topic.engine.read(T0, 2, 1 << 20))
    assert (len(chunk.data), chunk.next_offset) == (0, 2)
    for outside in (-1, 3, 1 << 62):
        with pytest.raises(OffsetOutOfRange) as caught:
            topic.done(topic.engine.read(T0, outside, 1 << 20))
        assert caught.value.fields["offset"] == outside
        assert (caught.value.fields["start"], caught.value.fields["end"]) == (0, 2)


def test_a_wait_ends_when_there_is_something_to_read(topic: House) -> None:
    waiting = topic.engine.wait(T0, 1)
    other = topic.engine.wait(T1, 0)
    topic.done(topic.engine.append(T0, batch(b"a")))
    assert not waiting.is_done
    seen: list[int] = []
    waiting.then(lambda _: seen.append(topic.engine.offsets(T0).high_watermark))
    topic.done(topic.engine.append(T0, batch(b"b")))
    assert seen == [2]
    assert not other.is_done
    assert topic.engine.wait(T0, 1).is_done
    topic.engine.forget(T1, other)


def test_a_wait_that_is_forgotten_never_ends(topic: House) -> None:
    forgotten, kept = topic.engine.wait(T0, 0), topic.engine.wait(T0, 0)
    topic.engine.forget(T0, forgotten)
    topic.done(topic.engine.append(T0, batch(b"a")))
    assert not forgotten.is_done
    assert kept.is_done


def test_who_is_woken_may_wait_again(topic: House) -> None:
    woken: list[int] = []

    def again(waited: Pending[None]) -> None:
        if waited.error is not None:
            return
        woken.append(topic.engine.offsets(T0).high_watermark)
        topic.engine.wait(T0, woken[-1]).then(again)

    topic.engine.wait(T0, 0).then(again)
    for count in range(3):
        topic.done(topic.engine.append(T0, batch(b"%d" % count)))
    assert woken == [1, 2, 3]


# ---- finding by time


def test_find_gives_the_first_record_at_or_after_a_time(topic: House) -> None:
    times = [(100, 105), (103,), (90, 120, 110), (115,), (300,)]
    for one in times:
        topic.done(topic.engine.append(T0, batch(*(b"x" for _ in one), times=one)))
    flat = [time for one in times for time in one]
    for wanted in (*range(85, 125), 299, 300, 301):
        expected = next(((at, t) for at, t in enumerate(flat) if t >= wanted), None)
        assert topic.done(topic.engine.find(T0, wanted)) == expected


def test_find_on_an_empty_partition_finds_nothing(topic: House) -> None:
    assert topic.done(topic.engine.find(T0, NOW_MS)) is None


def test_find_does_not_look_before_the_start(topic: House) -> None:
    topic.done(topic.engine.append(T0, batch(b"a", b"b", b"c", times=(10, 20, 30))))
    topic.done(topic.engine.trim(T0, 1))
    assert topic.done(topic.engine.find(T0, 0)) == (1, 20)


# ---- trimming


def test_trim_moves_the_start_and_what_lies_before_it_is_out_of_range(topic: House) -> None:
    for count in range(4):
        topic.done(topic.engine.append(T0, batch(b"%d" % count, b"x")))
    topic.done(topic.engine.trim(T0, 3))
    assert topic.engine.offsets(T0) == (3, 8)
    with pytest.raises(OffsetOutOfRange):
        topic.done(topic.engine.read(T0, 2, 1 << 20))
    # Whole batches: the one that holds the start still has the record before it.
    assert offsets(topic.done(topic.engine.read(T0, 3, 1)).data) == [2, 3]
    topic.done(topic.engine.trim(T0, 1))
    assert topic.engine.offsets(T0) == (3, 8)


def test_trim_to_the_end_leaves_an_empty_log_that_goes_on(topic: House) -> None:
    topic.done(topic.engine.append(T0, batch(b"a", b"b")))
    topic.done(topic.engine.trim(T0, 2))
    assert topic.engine.offsets(T0) == (2, 2)
    assert not len(topic.done(topic.engine.read(T0, 2, 1)).data)
    assert topic.done(topic.engine.append(T0, batch(b"c"))) == 2
    assert values(topic.done(topic.engine.read(T0, 2, 1)).data) == [b"c"]
    assert [record.offset for record in read_all(topic, T0)] == [2]


@pytest.mark.parametrize("offset", [-1, 3])
def test_trim_outside_the_log_is_refused(topic: House, offset: int) -> None:
    topic.done(topic.engine.append(T0, batch(b"a", b"b")))
    with pytest.raises(OffsetOutOfRange):
        topic.done(topic.engine.trim(T0, offset))
    assert topic.engine.offsets(T0) == (0, 2)


# ---- the rest


def test_a_running_engine_is_well_and_counts(topic: House) -> None:
    topic.done(topic.engine.append(T0, batch(b"a")))
    topic.done(topic.engine.claim("offsets/0"))
    assert topic.engine.health() == (True, None)
    numbers = {metric.name: metric.value for metric in topic.engine.metrics()}
    assert numbers["millstream_log_appends"] == 1
    assert numbers["millstream_log_topics"] == 1
    assert numbers["millstream_log_partitions"] == 2
    assert topic.engine.capabilities.atomic
    assert topic.engine.capabilities.exclusive


def test_a_stopped_engine_refuses_everything(topic: House) -> None:
    engine = topic.engine
    waiting = engine.wait(T0, 0)
    topic.stop()
    assert isinstance(waiting.error, EngineStopped)
    refusals: list[Pending[Any]] = [
        engine.append(T0, batch(b"a")),
        engine.append_atomic([(T0, batch(b"a"))]),
        engine.read(T0, 0, 1),
        engine.wait(T0, 0),
        engine.find(T0, 0),
        engine.create("u", 1, PartitionSettings()),
        engine.alter("t", partitions=3),
        engine.delete("t"),
        engine.trim(T0, 0),
        engine.producer_id(),
        engine.claim("offsets/0"),
    ]
    assert [type(pending.error) for pending in refusals] == [EngineStopped] * len(refusals)
    for call in (lambda: engine.offsets(T0), engine.topics):
        with pytest.raises(EngineStopped):
            call()
    assert not engine.health().ok


def test_what_was_taken_is_answered_before_the_engine_stops(topic: House) -> None:
    pendings = [topic.engine.append(T0, batch(b"%d" % n)) for n in range(10)]
    topic.stop()
    assert [pending.result() for pending in pendings] == list(range(10))


def test_records_come_back_as_they_went_in(topic: House) -> None:
    given = batches.encode([(5, b"k", b"v", [("h", b"1"), ("h", None)]), (7, None, None, [])])
    topic.done(topic.engine.append(T0, given))
    first, second = records(topic.done(topic.engine.read(T0, 0, 1)).data)
    assert (first.timestamp, first.key, first.value) == (5, b"k", b"v")
    assert first.headers == (("h", b"1"), ("h", None))
    assert (second.timestamp, second.key, second.value, second.headers) == (7, None, None, ())
