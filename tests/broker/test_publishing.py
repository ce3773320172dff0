"""Publishing: checks, partitions, batches of a turn, acks, ready-made batches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pytest

from broker.making import House, RefusingDisk, local_house, memory_house, options
from millstream.broker import ready_batches
from millstream.broker.publish_calls import BATCH_BYTES
from millstream.broker.publishing import Outgoing, Published
from millstream.engine.memory import MemoryEngine
from millstream.engine.pending import Pending
from millstream.errors import (
    BatchChecksumMismatch,
    BatchCompressionInvalid,
    BatchCountInvalid,
    BatchInvalid,
    BatchRecordInvalid,
    BatchTooLarge,
    DiskFull,
    HeaderInvalid,
    KeyRequired,
    MessageTooLarge,
    MillstreamError,
    ParameterInvalid,
    PartitionUnknown,
    TimestampInvalid,
    TopicReserved,
    TopicUnknown,
)
from millstream.log import batch as batches
from millstream.log._batch_layout import HEADER_BYTES, sealed
from millstream.log.batch import CONTROL_MASK, Record
from millstream.log.partition import PartitionId
from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from faults.simulated_disk import SimulatedDisk
    from millstream.log.disk import Disk


@pytest.fixture
def house() -> House:
    house = memory_house()
    house.done(house.broker.topics.create("t", 4))
    return house


def stored(house: House, topic: str = "t") -> dict[int, list[Record]]:
    """Every record, by partition."""
    count = house.broker.topics.get(topic).partitions
    fetched = [house.broker.reader.fetch(topic, n, 0, 100_000, 1 << 30) for n in range(count)]
    return {n: house.done(one).records for n, one in enumerate(fetched)}


def batches_in(house: House, number: int, topic: str = "t") -> list[int]:
    """How many records each batch of a partition has."""
    chunk = house.done(house.engine.read(PartitionId(topic, number), 0, 1 << 30))
    return [header.count for _, header in batches.walk(chunk.data)]


def publish(house: House, *records: Outgoing, **extra: str) -> Pending[Published]:
    return house.broker.publisher.publish("t", records, **extra)  # type: ignore[arg-type]


class Told:
    """Waits for the place of one record."""

    def __init__(self, breaks: bool = False) -> None:
        self.outcomes: list[Any] = []
        self._breaks = breaks

    def placed(self, partition: int, offset: int, timestamp_ms: int) -> None:
        self.outcomes.append((partition, offset, timestamp_ms))
        if self._breaks:
            raise RuntimeError("cannot be told")

    def fail(self, error: BaseException) -> None:
        self.outcomes.append(error)
        if self._breaks:
            raise RuntimeError("cannot be told")


def test_who_waits_lightly_is_told_the_same(house: House) -> None:
    publisher = house.broker.publisher
    first, breaks, last = Told(), Told(breaks=True), Told()
    for waiter in (first, breaks, last):
        assert publisher.publish_for(waiter, "t", b"k", b"v", (("a", b"1"),), 1234, 2)
    pending = publisher.publish_one("t", b"k", b"v", (), 1234, partition=2)
    assert house.done(pending) == (2, 3, 1234)
    told = [waiter.outcomes for waiter in (first, breaks, last)]
    assert told == [[(2, offset, 1234)] for offset in range(3)]
    assert stored(house)[2][0] == Record(0, 1234, b"k", b"v", (("a", b"1"),))
    assert batches_in(house, 2) == [4]


def test_who_waits_lightly_hears_of_what_is_wrong_at_once(house: House) -> None:
    publisher = house.broker.publisher
    waiter = Told()
    with pytest.raises(PartitionUnknown):
        publisher.publish_for(waiter, "t", None, b"v", (), None, 4)
    # A topic that has to be made first takes the long way.
    assert not publisher.publish_for(waiter, "another", None, b"v")
    assert waiter.outcomes == []


def test_an_append_that_fails_is_told_to_all_who_wait(house: House) -> None:
    publisher = house.broker.publisher
    waiters = [Told(), Told(breaks=True), Told()]
    for waiter in waiters:
        assert publisher.publish_for(waiter, "t", b"k", b"v")
    pending = publisher.publish_one("t", b"k", b"v")
    house.done(house.broker.topics.delete("t"))
    with pytest.raises(TopicUnknown):
        house.done(pending)
    assert all(isinstance(waiter.outcomes[0], TopicUnknown) for waiter in waiters)


def test_a_record_is_stored_as_it_was_sent(house: House) -> None:
    headers = (("a", b"1"), ("b", None))
    placed = house.done(
        house.broker.publisher.publish_one("t", b"k", b"v", headers, 1234, partition=2)
    )
    assert placed == (2, 0, 1234)
    assert stored(house)[2] == [Record(0, 1234, b"k", b"v", headers)]


def test_a_record_without_a_time_gets_the_brokers(house: House) -> None:
    house.scheduler.clock.now_ms = 777
    placed = house.done(house.broker.publisher.publish_one("t", None, None))
    assert placed.timestamp_ms == 777
    assert stored(house)[placed.partition] == [Record(0, 777)]


def test_a_key_goes_where_kafka_would_put_it(house: House) -> None:
    keys = [b"key-%d" % n for n in range(50)]
    placed = house.done(publish(house, *[Outgoing(key, b"") for key in keys])).placed
    assert [one.partition for one in placed] == [partition_of_key(key, 4) for key in keys]
    house.done(house.broker.topics.alter("t", {"partitioner": "murmur3"}))
    placed = house.done(publish(house, *[Outgoing(key, b"") for key in keys])).placed
    assert [one.partition for one in placed] == [
        partition_of_key(key, 4, "murmur3") for key in keys
    ]


def test_records_of_one_turn_for_one_partition_are_one_batch(house: House) -> None:
    publisher = house.broker.publisher
    ones = [publisher.publish_one("t", None, b"%d" % n) for n in range(20)]
    call = publish(house, Outgoing(None, b"a"), Outgoing(None, b"b"))
    assert [house.done(one).offset for one in ones] == list(range(20))
    assert [one.offset for one in house.done(call).placed] == [20, 21]
    assert batches_in(house, 0) == [22]
    assert [batches_in(house, n) for n in (1, 2, 3)] == [[], [], []]


def test_records_without_a_key_are_spread_evenly_over_time(house: House) -> None:
    for turn in range(400):
        # Large and small turns, in a pattern that simple rotation would not even out.
        for _ in range(9 if turn % 2 else 1):
            house.broker.publisher.publish_one("t", None, b"x" * 100)
        house.scheduler.run()
    counts = [len(records) for records in stored(house).values()]
    assert sum(counts) == 2000
    assert max(counts) - min(counts) <= 9


def test_a_new_partition_does_not_have_to_catch_up(house: House) -> None:
    for _ in range(40):
        house.done(house.broker.publisher.publish_one("t", None, b"x"))
    house.done(house.broker.topics.add_partitions("t", 5))
    for _ in range(50):
        house.done(house.broker.publisher.publish_one("t", None, b"x"))
    assert Counter(len(records) for records in stored(house).values()) == {20: 4, 10: 1}


def test_a_turn_of_many_bytes_is_several_batches(house: House) -> None:
    value = b"x" * (BATCH_BYTES // 3)
    pendings = [house.broker.publisher.publish_one("t", None, value, partition=1) for _ in range(7)]
    assert [house.done(pending).offset for pending in pendings] == list(range(7))
    assert batches_in(house, 1) == [2, 2, 2, 1]


def test_a_call_over_several_partitions_is_one_append(house: House) -> None:
    assert isinstance(house.engine, MemoryEngine)
    before = house.engine.appends
    records = [Outgoing(None, b"%d" % n, partition=n % 4) for n in range(10)]
    placed = house.done(publish(house, *records)).placed
    assert house.engine.appends == before + 1
    assert [one[:2] for one in placed] == [(n % 4, n // 4) for n in range(10)]


def test_records_keep_their_order_whatever_they_are_sent_with(house: House) -> None:
    publisher = house.broker.publisher
    publisher.publish_one("t", None, b"0", partition=1)
    publish(house, Outgoing(None, b"1", partition=1), Outgoing(None, b"-", partition=2))
    publisher.publish_one("t", None, b"2", partition=1)
    publisher.publish_batch("t", 1, batches.encode([(0, None, b"3", ())]))
    publish(house, Outgoing(None, b"4", partition=1), idempotency_key="k")
    house.done(publisher.publish_one("t", None, b"5", partition=1))
    assert [record.value for record in stored(house)[1]] == [b"%d" % n for n in range(6)]


def test_a_large_call_for_one_partition_is_stored_whole(house: House) -> None:
    value = b"x" * (BATCH_BYTES // 2)
    records = [Outgoing(None, value, partition=0) for _ in range(5)]
    placed = house.done(publish(house, *records)).placed
    assert [one.offset for one in placed] == [0, 1, 2, 3, 4]
    assert batches_in(house, 0) == [1, 1, 1, 1, 1]


BAD: list[tuple[Outgoing, type[MillstreamError], dict[str, object]]] = [
    (Outgoing(b"k", b"x" * 2000), MessageTooLarge, {"limit_bytes": 1000}),
    (Outgoing(b"k" * 600, b"x" * 600), MessageTooLarge, {}),
    (Outgoing(b"k", b"", (("h", b"x" * 1000),)), MessageTooLarge, {}),
    (Outgoing(b"k", b"", (), -1), TimestampInvalid, {"timestamp_ms": -1}),
    (Outgoing(b"k", b"", (), 2**63), TimestampInvalid, {}),
    (Outgoing(b"k", b"", (), None, 4), PartitionUnknown, {"partition": 4}),
    (Outgoing(b"k", b"", (), None, -1), PartitionUnknown, {"partition": -1}),
    (Outgoing(b"k", b"", (("", b""),)), HeaderInvalid, {"header": ""}),
    (Outgoing(b"k", b"", (("x" * 256, b""),)), HeaderInvalid, {}),
    (Outgoing(b"k", b"", (("\ud800", b""),)), HeaderInvalid, {"header": "?"}),
    (Outgoing(None, b""), KeyRequired, {}),
]


@pytest.mark.parametrize(("record", "kind", "fields"), BAD)
def test_a_bad_record_is_named_and_none_is_stored(
    house: House, record: Outgoing, kind: type[MillstreamError], fields: dict[str, object]
) -> None:
    house.done(house.broker.topics.alter("t", {"message_bytes_max": 1000, "compact": True}))
    good = Outgoing(b"k", b"v")
    error = house.failed(publish(house, good, good, record, good))
    assert isinstance(error, kind)
    assert error.fields["record"] == 2
    assert fields.items() <= error.fields.items()
    assert isinstance(house.failed(house.broker.publisher.publish_one("t", *record)), kind)
    assert not any(stored(house).values())


def test_what_just_fits_is_stored(house: House) -> None:
    house.done(house.broker.topics.alter("t", {"message_bytes_max": 1000}))
    house.done(house.broker.publisher.publish_one("t", b"k" * 400, b"v" * 600))
    many = tuple(("h" * 100, b"x" * 96) for _ in range(5))
    house.done(house.broker.publisher.publish_one("t", None, b"", many))


def test_no_record_and_strange_acks_are_refused(house: House) -> None:
    assert isinstance(house.failed(publish(house)), BatchCountInvalid)
    error = house.failed(publish(house, Outgoing(None, b""), acks="some"))
    assert isinstance(error, ParameterInvalid)
    assert error.fields["parameter"] == "acks"


@pytest.mark.parametrize("acks", ["leader", "all"])
def test_acks_wait_until_it_is_durable(acks: str) -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 1))
    pending = publish(house, Outgoing(None, b"v"), acks=acks)
    assert not pending.is_done
    assert house.done(pending).placed[0].offset == 0


def test_acks_none_does_not_wait(house: House) -> None:
    pending = publish(house, Outgoing(b"k", b"v", timestamp_ms=5), acks="none")
    assert pending.is_done
    assert pending.result().placed == [(partition_of_key(b"k", 4), -1, 5)]
    house.scheduler.run()
    assert sum(map(len, stored(house).values())) == 1


def test_publishing_makes_a_topic_once(house: House) -> None:
    publisher = house.broker.publisher
    pendings = [publisher.publish_one("new", None, b"%d" % n) for n in range(5)]
    offsets = sorted(house.done(pending).offset for pending in pendings)
    assert offsets == [0, 1, 2, 3, 4]
    assert house.broker.topics.get("new").partitions == 3
    batch = batches.encode([(0, None, b"v", ())])
    assert house.done(publisher.publish_batch("newer", 0, batch)) == 0


def test_what_is_refused_makes_no_topic(house: House) -> None:
    publisher = house.broker.publisher
    batch = batches.encode([(0, None, b"v", ())])
    refused: list[Pending[Any]] = [
        publisher.publish_one("new", None, b"", partition=3),
        publisher.publish("new", [Outgoing(None, b""), Outgoing(None, b"", partition=3)]),
        publisher.publish_batch("new", 3, batch),
    ]
    for pending in refused:
        assert isinstance(house.failed(pending), PartitionUnknown)
    assert "new" not in house.broker.topics.by_name
    assert house.done(publisher.publish_one("new", None, b"", partition=2)).partition == 2


def test_without_auto_creation_an_unknown_topic_is_an_error() -> None:
    house = memory_house(options(is_auto_create=False))
    batch = batches.encode([(0, None, b"v", ())])
    publisher = house.broker.publisher
    assert isinstance(house.failed(publisher.publish_one("x", None, b"")), TopicUnknown)
    assert isinstance(house.failed(publisher.publish("x", [Outgoing(None, b"")])), TopicUnknown)
    assert isinstance(house.failed(publisher.publish_batch("x", 0, batch)), TopicUnknown)


def test_clients_do_not_write_to_the_brokers_own_topics(house: House) -> None:
    batch = batches.encode([(0, b"k", b"v", ())])
    publisher = house.broker.publisher
    pendings: list[Pending[Any]] = [
        publisher.publish_one("__topics", b"k", b"v"),
        publisher.publish("__topics", [Outgoing(b"k", b"v")]),
        publisher.publish_batch("__topics", 0, batch),
    ]
    for pending in pendings:
        assert isinstance(house.failed(pending), TopicReserved)


def test_a_topic_deleted_under_a_publish_is_an_error(house: House) -> None:
    deleting = house.broker.topics.delete("t")
    pending = house.broker.publisher.publish_one("t", None, b"v")
    house.done(deleting)
    # Made again by the publish, or refused: never stored in what is gone.
    house.scheduler.run()
    assert pending.is_done
    if pending.error is None:
        assert house.broker.topics.get("t")
    else:
        assert isinstance(pending.error, TopicUnknown)


def test_a_mistake_of_one_caller_leaves_nobody_waiting(house: House) -> None:
    publisher = house.broker.publisher
    # A value that has a length and is no bytes: no listener sends one.
    mistake: Any = "text"
    good = publisher.publish_one("t", None, b"good", partition=0)
    pendings: list[Pending[Any]] = [
        publisher.publish_one("t", None, mistake, partition=1),
        publisher.publish("t", [Outgoing(None, mistake, partition=2)], idempotency_key="a"),
    ]
    last = publisher.publish_one("t", None, b"good", partition=3)
    house.scheduler.run()
    assert [isinstance(pending.error, TypeError) for pending in pendings] == [True, True]
    assert good.result().offset == last.result().offset == 0


@pytest.mark.parametrize(
    ("key", "ends"), [(None, [1, 0]), ("key", [0, 0])], ids=["alone", "with a key"]
)
def test_a_disk_that_gets_full_may_leave_some_in_a_weak_mode_unless_there_is_a_key(
    key: str | None, ends: list[int]
) -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Disk:
        disks.append(RefusingDisk(disk))
        return cast("Disk", disks[0])

    house = local_house(through=through).start()
    house.done(house.broker.topics.create("t", 2, {"fsync": "none"}))
    disks[0].writes_left = 1 if key is None else 0
    both = [Outgoing(None, b"x", partition=0), Outgoing(None, b"y", partition=1)]
    publishing = house.broker.publisher.publish("t", both, idempotency_key=key)
    assert isinstance(house.failed(publishing), DiskFull)
    disks[0].writes_left = None
    assert [house.broker.reader.offsets("t", n).high_watermark for n in (0, 1)] == ends
    again = house.done(house.broker.publisher.publish("t", both, idempotency_key=key))
    assert [one.offset for one in again.placed] == ends


# ---- ready-made batches


def ready(*values: bytes, **extra: Any) -> bytes:
    return batches.encode([(5, b"k", value, ()) for value in values], **extra)


def test_a_ready_made_batch_is_stored_byte_for_byte(house: House) -> None:
    batch = ready(b"a", b"b", compression="gzip")
    assert house.done(house.broker.publisher.publish_batch("t", 3, batch)) == 0
    assert house.done(house.broker.publisher.publish_batch("t", 3, batch)) == 2
    data = house.done(house.broker.reader.read_batches("t", 3, 0, 1 << 20))
    assert data[16 : len(batch)] == batch[16:]
    assert [record.value for record in stored(house)[3]] == [b"a", b"b", b"a", b"b"]


def test_several_ready_made_batches_are_stored_all_or_none(house: House) -> None:
    publisher = house.broker.publisher
    good, bad = ready(b"a"), bytearray(ready(b"b"))
    bad[-1] ^= 1
    error = house.failed(publisher.publish_batches("t", [(0, good), (1, bytes(bad))]))
    assert isinstance(error, BatchChecksumMismatch)
    assert error.fields["batch"] == 1
    assert not any(stored(house).values())
    assert house.done(publisher.publish_batches("t", [(0, good), (1, good), (0, good)])) == [
        0,
        0,
        1,
    ]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_message_too_large_in_a_ready_made_batch_is_named_and_none_is_stored(
    house: House, compression: str
) -> None:
    publisher = house.broker.publisher
    house.done(house.broker.topics.alter("t", {"message_bytes_max": 1000}))
    good = ready(*[b"x" * 999] * 5, compression=compression)
    own = (5, b"k" * 400, b"x" * 590, (("h", b"xxxxx"), ("ms-type", b"json")))
    fits = batches.encode([own] * 5, compression=compression)
    over = batches.encode(
        [own, own, (5, b"k" * 400, b"x" * 590, (("h", b"xxxxxx"), ("ms-type", b"json")))],
        compression=compression,
    )
    for bad, record in (
        (ready(b"x", b"x" * 1000, compression=compression), 1),
        (ready(b"x" * 1000, compression=compression), 0),
        (ready(*[b"x"] * 500, b"x" * 1000, compression=compression), 500),
        (over, 2),
    ):
        error = house.failed(publisher.publish_batches("t", [(0, good), (1, bad)]))
        assert isinstance(error, MessageTooLarge)
        assert error.fields == {"limit_bytes": 1000, "record": record, "batch": 1}
    assert not any(stored(house).values())
    house.done(publisher.publish_batches("t", [(0, good), (1, fits)]))
    assert [len(records) for records in stored(house).values()] == [5, 5, 0, 0]


def test_records_of_a_batch_that_holds_no_large_one_are_not_looked_at(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_batches, "_require_sizes", None)
    house.done(house.broker.topics.alter("t", {"message_bytes_max": 100_000}))
    for compression in ("none", "zstd"):
        batch = ready(*[b"x" * 100] * 900, compression=compression)
        house.done(house.broker.publisher.publish_batch("t", 0, batch))


def bomb(records: int, lane: str | None = None) -> bytes:
    """Few bytes, and many records."""
    headers = () if lane is None else (("ms-lane", lane.encode()),)
    return batches.encode([(0, None, b"x", headers)] * records, compression="zstd", lane=lane)


def test_a_ready_made_batch_has_a_limit_of_records(house: House) -> None:
    publisher = house.broker.publisher
    most = ready_batches.BATCH_RECORDS_MAX
    assert house.done(publisher.publish_batch("t", 0, bomb(most))) == 0
    error = house.failed(publisher.publish_batches("t", [(1, ready(b"x")), (0, bomb(most + 1))]))
    assert isinstance(error, BatchTooLarge)
    assert error.fields == {"limit_records": most, "batch": 1}
    assert house.broker.reader.offsets("t", 1) == (0, 0)


def test_a_request_of_ready_made_batches_has_limits_of_records_and_of_inflated_bytes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = house.broker.publisher
    two = [(0, bomb(500)), (1, bomb(500))]
    inflated = len(batches.encode([(0, None, b"x", ())] * 500))
    monkeypatch.setattr(ready_batches, "REQUEST_RECORDS_MAX", 1000)
    monkeypatch.setattr(ready_batches, "REQUEST_INFLATED_BYTES_MAX", 2 * inflated)
    house.done(publisher.publish_batches("t", two))
    for name, limit, field in (
        ("REQUEST_RECORDS_MAX", 999, "limit_records"),
        ("REQUEST_INFLATED_BYTES_MAX", 2 * inflated - 100, "limit_bytes"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ready_batches, name, limit)
            error = house.failed(publisher.publish_batches("t", two))
        assert isinstance(error, BatchTooLarge)
        assert error.fields == {field: limit, "batch": 1}
    assert house.broker.reader.offsets("t", 0) == (0, 500)


def test_others_have_a_turn_between_large_batches_and_each_is_checked_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = ready_batches.check_batch

    def counted(*arguments: Any) -> ready_batches.Checked:
        checked.append(1)
        return check(*arguments)

    monkeypatch.setattr(ready_batches, "check_batch", counted)
    data = bomb(ready_batches.BREATH_RECORDS, "high")
    publishing = house.broker.publisher.publish_batches("t", [(0, data), (1, data), (2, data)])
    assert len(checked) == 1
    house.done(publishing)
    assert len(checked) == 3
    assert house.broker.topics.get("t").uses_lanes


def test_batches_for_a_topic_that_is_made_again_while_they_are_checked_are_refused(
    house: House,
) -> None:
    data = bomb(ready_batches.BREATH_RECORDS)
    publishing = house.broker.publisher.publish_batches("t", [(0, data), (3, data)])
    before = house.broker.topics.get("t")
    house.broker.topics.by_name["t"] = before._replace(uuid=UUID(int=7))
    assert isinstance(house.failed(publishing), TopicUnknown)
    house.broker.topics.by_name["t"] = before
    assert not any(stored(house).values())


def test_headers_of_the_broker_do_not_count_for_the_largest_message(house: House) -> None:
    house.done(house.broker.topics.alter("t", {"message_bytes_max": 1000}))
    own = (("ms-type", b"json"), ("ms-lane", b"high"))
    house.done(house.broker.publisher.publish_one("t", b"k" * 400, b"v" * 600, own))
    house.done(publish(house, Outgoing(b"k" * 400, b"v" * 600, own), idempotency_key="k"))
    error = house.failed(publish(house, Outgoing(b"k" * 400, b"v" * 601, own)))
    assert isinstance(error, MessageTooLarge)
    assert "has 1001 bytes" in error.message


def test_what_no_client_may_send_is_refused(house: House) -> None:
    publisher = house.broker.publisher
    control = ready(b"x", control=True)
    assert batches.read_header(control).attributes & CONTROL_MASK
    wrong: list[tuple[int, bytes, type[MillstreamError]]] = [
        (0, control, BatchInvalid),
        (0, ready(b"x", transactional=True), BatchInvalid),
        (0, ready(b"x" * (2 << 20)), BatchTooLarge),
        (0, b"", BatchInvalid),
        (0, b"\0" * 100, BatchInvalid),
        (0, ready(b"x") + b"x", BatchInvalid),
        (4, ready(b"x"), PartitionUnknown),
    ]
    for number, batch, kind in wrong:
        error = house.failed(publisher.publish_batch("t", number, batch))
        assert isinstance(error, kind)
        assert error.fields["batch"] == 0
    assert isinstance(house.failed(publisher.publish_batches("t", [])), BatchCountInvalid)


def test_a_batch_that_would_not_open_for_a_reader_is_refused(house: House) -> None:
    good = ready(b"a", b"b")
    header = batches.read_header(good)
    # Whole from outside, its CRC right: only the second record says a length that is not there.
    body = bytearray(good[HEADER_BYTES:])
    body[len(body) // 2] = 0x7E
    wrong = sealed(header, bytes(body))
    assert batches.verify(wrong, bytes_max=10_000).count == 2
    error = house.failed(house.broker.publisher.publish_batch("t", 0, wrong))
    assert isinstance(error, BatchRecordInvalid)
    assert error.fields["record"] == 1
    empty = sealed(header._replace(attributes=1), b"not gzip, and long enough")
    assert isinstance(
        house.failed(house.broker.publisher.publish_batch("t", 0, empty)), BatchCompressionInvalid
    )
    assert not any(stored(house).values())


def test_a_compacted_topic_wants_keys_in_ready_made_batches(house: House) -> None:
    house.done(house.broker.topics.alter("t", {"compact": True}))
    batch = batches.encode([(0, b"k", b"", ()), (0, None, b"", ())])
    error = house.failed(house.broker.publisher.publish_batch("t", 0, batch))
    assert isinstance(error, KeyRequired)
    assert error.fields["record"] == 1


def test_a_repeated_batch_of_a_producer_gets_the_offset_of_the_first(house: House) -> None:
    publisher = house.broker.publisher
    batch = ready(b"a", b"b", producer_id=7, producer_epoch=0, base_sequence=0)
    first = publisher.publish_batch("t", 0, batch)
    second = publisher.publish_batch("t", 0, batch)
    assert (house.done(first), house.done(second)) == (0, 0)
    assert len(stored(house)[0]) == 2


@pytest.mark.parametrize("fsync", ["interval", "none"])
def test_weak_topics_do_not_wait_for_the_disk(fsync: str) -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 3, {"fsync": fsync}))
    assert not isinstance(house.engine, MemoryEngine)
    committer = house.engine._committer
    assert committer is not None
    before = committer.counts.rounds
    records = [Outgoing(None, b"%d" % n, partition=n % 3) for n in range(9)]
    assert [one[:2] for one in house.done(publish(house, *records)).placed] == [
        (n % 3, n // 3) for n in range(9)
    ]
    entries = [(n, ready(b"x")) for n in range(3)]
    assert house.done(house.broker.publisher.publish_batches("t", entries)) == [3, 3, 3]
    assert committer.counts.rounds == before


def test_traffic_is_counted_by_topic_and_totals_never_fall(house: House) -> None:
    publisher, traffic = house.broker.publisher, house.broker.traffic
    house.done(publisher.publish_one("t", None, b"x" * 100))
    house.done(publish(house, *[Outgoing(None, b"y", partition=n) for n in range(3)]))
    house.done(publisher.publish_batch("t", 0, ready(b"a", b"b")))
    stored(house)
    mine = traffic.by_topic["t"]
    assert (mine.messages_in, mine.messages_out) == (6, 6)
    assert mine.bytes_in > 103
    before = traffic.total()
    house.done(house.broker.topics.delete("t"))
    assert traffic.total() == before
    assert traffic.by_topic == {}
