"""Other people's brokers: throttled, ignorant for a moment, or behind. Against one that is
scripted, under a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from kafka.protocol.consumer.group import OffsetCommitRequest
from kafka.protocol.metadata import MetadataRequest

from millstream.errors import BrokerUnreachable, DataLost, OptionInvalid
from millstream.spark.commits import AGAIN_S
from millstream.spark.driver import Driver
from millstream.spark.latest import POLL_S
from millstream.spark.positions import Position
from millstream.spark.ranges import Range
from millstream.spark.rows import ARROW_TYPES, Shape
from millstream.spark.slices import Reading, Task, read
from millstream.spark.source_options import read_source_options
from spark.moved_clock import MovedClock
from spark.scripted_kafka import Log, ScriptedKafka, honest, ignorant, throttled

# What waits in vain here waits for ever: time does not pass by itself.
pytestmark = pytest.mark.timeout(60)
SHAPE = Shape(pa.schema([(name, ARROW_TYPES[name]) for name in ("offset", "value")]))
PATIENCE_S = 120.0
OFFSET_OUT_OF_RANGE, INVALID_GROUP_ID, UNKNOWN_MEMBER_ID = 1, 24, 25


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def scripted() -> Iterator[ScriptedKafka]:
    with ScriptedKafka() as made:
        yield made


def driver_of(scripted: ScriptedKafka, clock: MovedClock, **more: str) -> Driver:
    given = {"servers": scripted.address, "subscribe": "orders"} | {
        name.replace("__", "."): text for name, text in more.items()
    }
    options = read_source_options(given, {}, is_stream=None)
    return Driver(options, clock=clock, sleep=clock.sleep)


def reading_of(driver: Driver, **more: Any) -> Reading:
    options = driver.options
    return Reading(
        place=options.place,
        servers=driver.servers,
        shape=SHAPE,
        access="wire",
        isolation=options.isolation,
        fetch_bytes=options.fetch_bytes,
        is_failing_on_loss=options.is_failing_on_loss,
    )


def rows(scripted: ScriptedKafka, clock: MovedClock, end: int, **more: str) -> list[bytes]:
    """The values of orders/0, up to an offset."""
    driver = driver_of(scripted, clock, **more)
    task = Task(Range(("orders", 0), 0, end), str(scripted.ids["orders"]), None)
    found = read(reading_of(driver), task, clock=clock, sleep=clock.sleep)
    return [row["value"] for made in found for row in made.to_pylist()]


# ---- quotas


@pytest.mark.parametrize("version", [4, 7, 12])
def test_a_fetch_over_its_quota_is_asked_again_after_the_time_it_was_told(
    clock: MovedClock, version: int
) -> None:
    with ScriptedKafka(fetch_version=version) as scripted:
        scripted.make("orders", Log().add(b"a", b"b"))
        scripted.plan(FetchRequest, throttled(3_000), throttled(7_000))
        assert rows(scripted, clock, 2) == [b"a", b"b"]
    assert [round(one) for one in clock.slept_s] == [3, 7]


def test_a_broker_that_throttles_for_ever_is_named(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.plan(FetchRequest, *[throttled(10_000)] * 20)
    with pytest.raises(BrokerUnreachable, match="quota"):
        rows(scripted, clock, 1)
    assert sum(clock.slept_s) <= PATIENCE_S


# ---- a broker that has just started


def test_a_broker_that_knows_no_topic_for_a_moment_has_not_lost_it(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a", b"b"))
    scripted.plan(FetchRequest, ignorant, ignorant, ignorant)
    assert rows(scripted, clock, 2) == [b"a", b"b"]
    # Nor when it says so at every turn, once.
    scripted.plan(MetadataRequest, ignorant)
    assert rows(scripted, clock, 2) == [b"a", b"b"]
    scripted.plan(FetchRequest, ignorant)
    scripted.plan(MetadataRequest, honest, honest, ignorant)
    assert rows(scripted, clock, 2) == [b"a", b"b"]


def test_a_topic_that_stays_away_is_gone(scripted: ScriptedKafka, clock: MovedClock) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.topics.clear()
    with pytest.raises(DataLost, match="its topic was deleted"):
        rows(scripted, clock, 1)
    assert rows(scripted, clock, 1, failOnDataLoss="false") == []


def test_a_topic_that_was_made_again_is_seen_at_the_first_look(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    old = str(scripted.ids["orders"])
    scripted.make("orders", Log().add(b"b"))
    task = Task(Range(("orders", 0), 0, 1), old, None)
    with pytest.raises(DataLost):
        list(read(reading_of(driver_of(scripted, clock)), task, clock=clock, sleep=clock.sleep))
    assert clock.slept_s == []


def test_a_leader_that_never_knows_its_topic_is_waited_for_and_named(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.plan(FetchRequest, *[ignorant] * 10_000)
    with pytest.raises(BrokerUnreachable, match="UNKNOWN_TOPIC_OR_PARTITION"):
        rows(scripted, clock, 1)
    assert PATIENCE_S - 2 < sum(clock.slept_s) <= PATIENCE_S


# ---- the driver of a stream


def started(driver: Driver) -> Position:
    """Where a query is that has read all there is."""
    return driver.latest(Position())


@pytest.mark.parametrize(("api", "times"), [(MetadataRequest, 2), (ListOffsetsRequest, 1)])
def test_one_look_is_not_enough_to_call_a_topic_deleted(
    scripted: ScriptedKafka, clock: MovedClock, api: Any, times: int
) -> None:
    scripted.make("orders", Log().add(b"a"), Log())
    driver = driver_of(scripted, clock)
    start = started(driver)
    clock.now_s += 10
    # What is new is asked for once more at once; that is the same look.
    scripted.plan(api, *[ignorant] * times)
    assert driver.latest(start) == start
    assert len(clock.slept_s) == 1
    # The first look of a query that goes on from its checkpoint.
    again = driver_of(scripted, clock)
    scripted.plan(api, *[ignorant] * times)
    assert again.latest(start) == start
    # And of one that is to read only what is there now.
    now = driver_of(scripted, clock)
    scripted.plan(api, *[ignorant] * times)
    now.fix_latest()
    assert now.latest(start) == start


def test_two_looks_are_enough_and_no_more_are_paid_for(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    driver = driver_of(scripted, clock)
    start = started(driver)
    clock.now_s += 10
    scripted.topics.clear()
    assert driver.latest(start).offsets == {}
    clock.now_s += 10
    assert driver.latest(start).offsets == {}
    assert len(clock.slept_s) == 1


def test_a_stream_of_what_is_there_now_reads_no_partition_that_came_since(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"), Log())
    start = started(driver_of(scripted, clock))
    now = driver_of(scripted, clock)
    scripted.plan(MetadataRequest, ignorant, ignorant)
    now.fix_latest()
    scripted.topics["orders"].append(Log().add(b"new"))
    assert now.latest(start) == start
    assert now.latest(start) == start


# ---- ends that cannot be reached


def test_an_end_past_the_log_is_told_before_anything_is_read(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a", b"b"), Log())
    ends = '{"orders": {"0": 5, "1": 0}}'
    with pytest.raises(OptionInvalid) as caught:
        driver_of(scripted, clock, endingOffsets=ends).ending()
    assert caught.value.fields["option"] == "endingOffsets"
    assert "orders/0, which can be read up to 2" in caught.value.message
    lenient = driver_of(scripted, clock, endingOffsets=ends, failOnDataLoss="false")
    assert lenient.ending().offsets == {("orders", 0): 2, ("orders", 1): 0}
    assert lenient.loss.offsets == 3


def test_records_behind_an_open_transaction_are_waited_for(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    log = Log(stable=1).add(b"a").add(b"b").add(b"c")
    scripted.make("orders", log)

    def ended(answer: Any) -> Any:
        log.stable = None
        return answer

    scripted.plan(FetchRequest, *[honest] * 8, ended)
    assert rows(scripted, clock, 3) == [b"a", b"b", b"c"]


def test_a_transaction_that_stays_open_is_named(scripted: ScriptedKafka, clock: MovedClock) -> None:
    scripted.make("orders", Log(stable=1).add(b"a").add(b"b"))

    def waited(answer: Any) -> Any:
        clock.now_s += 0.5
        return answer

    scripted.plan(FetchRequest, *[waited] * 300)
    with pytest.raises(BrokerUnreachable, match="a transaction is open at offset 1"):
        rows(scripted, clock, 2)
    # Who reads what is not committed does not wait for it.
    scripted.script.clear()
    uncommitted = {"kafka.isolation.level": "read_uncommitted"}
    assert rows(scripted, clock, 2, **uncommitted) == [b"a", b"b"]
    driver = driver_of(scripted, clock, **uncommitted)
    assert driver.ending().offsets == {("orders", 0): 2}
    assert driver_of(scripted, clock).ending().offsets == {("orders", 0): 1}


def test_records_of_transactions_that_were_given_up_are_only_for_those_who_ask(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    log = Log(aborted=[(7, 1)])
    log.add(b"plain").add(b"given up", producer_id=7, transactional=True)
    log.add(b"kept", producer_id=8, transactional=True).mark(7, is_commit=False)
    log.mark(8, is_commit=True).add(b"later", producer_id=7, transactional=True)
    log.mark(7, is_commit=True)
    scripted.make("orders", log)
    assert rows(scripted, clock, log.end) == [b"plain", b"kept", b"later"]
    uncommitted = {"kafka.isolation.level": "read_uncommitted"}
    found = rows(scripted, clock, log.end, **uncommitted)
    assert found == [b"plain", b"given up", b"kept", b"later"]


def test_what_compaction_took_at_the_end_is_not_waited_for(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.topics["orders"][0].end = 5
    assert rows(scripted, clock, 5) == [b"a"]


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"startingOffsets": '{"orders": {"0": 3}}', "endingTimestamp": "0"}, "endingTimestamp"),
        ({"startingTimestamp": "5", "endingOffsets": '{"orders": {"0": 1}}'}, "endingOffsets"),
        (
            {
                "startingOffsets": "committed",
                "groupId": "g",
                "endingOffsetsByTimestamp": '{"orders": {"0": 0}}',
            },
            "endingOffsetsByTimestamp",
        ),
        ({"endingOffsets": '{"orders": {"0": 1}}'}, "endingOffsets"),
    ],
)
def test_a_batch_that_would_end_before_its_start_is_refused_by_name(
    scripted: ScriptedKafka, clock: MovedClock, given: dict[str, str], option: str
) -> None:
    # Every time is offset 2, where the log begins.
    scripted.make("orders", Log(start=2).add(b"a", b"b", b"c", b"d"))
    scripted.committed["g"] = {("orders", 0): 3}
    driver = driver_of(scripted, clock, **given)
    start, end = driver.starting(), driver.ending()
    with pytest.raises(OptionInvalid) as caught:
        driver.require_order(start, end)
    assert caught.value.fields["option"] == option
    assert "end at or after the start" in caught.value.message


def test_a_batch_all_of_which_is_gone_is_empty_where_loss_is_allowed(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log(start=2).add(b"a", b"b", b"c", b"d"))
    given = {
        "startingOffsets": '{"orders": {"0": 0}}',
        "endingOffsets": '{"orders": {"0": 1}}',
        "failOnDataLoss": "false",
    }
    driver = driver_of(scripted, clock, **given)
    start, end = driver.starting(), driver.ending()
    driver.require_order(start, end)
    assert start.offsets == end.offsets


def test_a_log_whose_end_was_lost_is_still_that_for_a_stream(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    driver = driver_of(scripted, clock)
    start = Position({("orders", 0): 7}, {"orders": str(scripted.ids["orders"])})
    with pytest.raises(DataLost, match=r"offsets 1 to 6 .*\(the log's end was lost"):
        driver.tasks(start, driver.latest(start))


# ---- offsets in a group


def refusing(answer: Any) -> Any:
    """A group that has members of its own."""
    for topic in answer.topics:
        for one in topic.partitions:
            one.error_code = UNKNOWN_MEMBER_ID
    return answer


def nameless(answer: Any) -> Any:
    """A broker that takes no group of that name."""
    for topic in answer.topics:
        for one in topic.partitions:
            one.error_code = INVALID_GROUP_ID
    return answer


def test_a_group_whose_name_the_broker_refuses_is_a_wrong_option(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.plan(OffsetCommitRequest, nameless, nameless)
    for option in ("groupId", "kafka.group.id"):
        driver = driver_of(scripted, clock, **{option.replace(".", "__"): "my group"})
        with pytest.raises(OptionInvalid, match=f"option {option} is 'my group', .* use 1 to 255"):
            driver.commit(driver.latest(Position()))


def test_a_commit_that_was_refused_is_tried_again_a_while_later(
    scripted: ScriptedKafka, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.make("orders", Log().add(b"a"))
    driver = driver_of(scripted, clock, groupId="billing")
    position = driver.latest(Position())
    scripted.plan(OffsetCommitRequest, refusing, refusing)
    for _ in range(50):
        driver.commit(position)
    assert scripted.asked[OffsetCommitRequest.API_KEY] == 1
    assert "offsets of the group billing" in caplog.text
    clock.now_s += AGAIN_S
    driver.commit(position)
    assert scripted.asked[OffsetCommitRequest.API_KEY] == 2
    # What is new is said at once; what is said is not said again.
    scripted.topics["orders"][0].add(b"b")
    clock.now_s += 1
    moved = driver.latest(position)
    for _ in range(50):
        driver.commit(moved)
    assert scripted.asked[OffsetCommitRequest.API_KEY] == 3
    assert scripted.committed["billing"] == {("orders", 0): 2}
    clock.now_s += AGAIN_S
    driver.commit(moved)
    assert scripted.asked[OffsetCommitRequest.API_KEY] == 3


def test_a_topic_that_is_subscribed_no_more_is_not_just_called_deleted(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.make("payments", Log().add(b"a"))
    start = driver_of(scripted, clock, subscribe="orders,payments").latest(Position())
    driver = driver_of(scripted, clock)
    end = driver.latest(start)
    assert end.offsets == {("orders", 0): 1}
    with pytest.raises(DataLost, match="payments is no longer subscribed, or was deleted"):
        driver.require_all(start, end)
    driver_of(scripted, clock, failOnDataLoss="false").require_all(start, end)


def test_a_new_partition_that_does_not_begin_at_its_first_offset_is_lost_data(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    start = driver_of(scripted, clock).latest(Position())
    for log, is_lost in ((Log().add(b"b"), False), (Log(start=2, end=5), True)):
        scripted.topics["orders"].append(log)
        driver = driver_of(scripted, clock)
        end = driver.latest(start)
        if is_lost:
            with pytest.raises(DataLost, match="offsets 0 to 1 of orders/2"):
                driver.tasks(start, end)
        else:
            assert [task.range for task in driver.tasks(start, end)] == [(("orders", 1), 0, 1)]
    lenient = driver_of(scripted, clock, failOnDataLoss="false")
    ranges = [task.range for task in lenient.tasks(start, lenient.latest(start))]
    assert ranges == [(("orders", 1), 0, 1), (("orders", 2), 2, 5)]
    assert lenient.loss.offsets == 2


# ---- offsets that are out of range, and are not


def out_of_range(answer: Any) -> Any:
    for topic in answer.responses:
        for one in topic.partitions:
            one.error_code, one.records = OFFSET_OUT_OF_RANGE, b""
    return answer


def test_an_offset_that_is_there_after_all_is_asked_for_again_after_a_pause(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a").add(b"b"))
    scripted.plan(FetchRequest, out_of_range, out_of_range)
    assert rows(scripted, clock, 2) == [b"a", b"b"]
    assert len(clock.slept_s) == 2
    # Nor is what a broker does not know for a moment the end of the log.
    scripted.plan(FetchRequest, out_of_range)
    scripted.plan(ListOffsetsRequest, ignorant, ignorant)
    assert rows(scripted, clock, 2) == [b"a", b"b"]


def test_a_broker_that_contradicts_itself_is_given_up(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.plan(FetchRequest, *[out_of_range] * 1_000)
    with pytest.raises(BrokerUnreachable, match="offset 0 of orders/0 is out of range") as caught:
        rows(scripted, clock, 1)
    assert "kafkaConsumer.pollTimeoutMs" in caught.value.message
    assert PATIENCE_S - 2 < sum(clock.slept_s) <= PATIENCE_S
    assert scripted.asked[FetchRequest.API_KEY] < 200


def test_a_log_that_ends_early_is_read_up_to_its_end_before_anything_is_lost(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log().add(b"a"))
    scripted.plan(FetchRequest, out_of_range, honest, out_of_range)
    assert rows(scripted, clock, 3, failOnDataLoss="false") == [b"a"]
    assert len(clock.slept_s) == 1


def test_an_offset_that_is_out_of_range_is_lost_data(
    scripted: ScriptedKafka, clock: MovedClock
) -> None:
    scripted.make("orders", Log(start=1).add(b"a").add(b"b"))
    with pytest.raises(DataLost, match=r"offsets 0 to 0 .*\(retention\)"):
        rows(scripted, clock, 2)
    assert rows(scripted, clock, 2, failOnDataLoss="false") == [b"b"]
    scripted.make("orders", Log().add(b"a"))
    scripted.plan(FetchRequest, honest, out_of_range)
    with pytest.raises(DataLost, match=r"offsets 1 to 2 .*\(the log's end was lost\)"):
        rows(scripted, clock, 3)
    assert clock.slept_s == []


# ---- times that no record has


@pytest.mark.parametrize(("suffix", "start"), [("", "-2"), ("ByTimestamp", "0")])
def test_who_names_some_partitions_learns_how_to_read_all_of_the_others(
    scripted: ScriptedKafka, clock: MovedClock, suffix: str, start: str
) -> None:
    scripted.make("orders", Log().add(b"a"), Log().add(b"b"))
    driver = driver_of(scripted, clock, **{f"startingOffsets{suffix}": '{"orders": {"0": 0}}'})
    with pytest.raises(OptionInvalid, match=f"nothing of orders/1; .*, {start} is its start$"):
        driver.starting()


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"startingTimestamp": "500"}, "startingTimestamp"),
        (
            {"startingOffsetsByTimestamp": '{"orders": {"0": 500, "1": 1}}'},
            "startingOffsetsByTimestamp",
        ),
    ],
)
def test_a_start_that_no_record_is_as_new_as_is_an_error_or_the_end(
    scripted: ScriptedKafka, clock: MovedClock, given: dict[str, str], option: str
) -> None:
    scripted.make("orders", Log(newest_ms=400).add(b"a", b"b"), Log(newest_ms=600).add(b"c"))
    for strategy in ({}, {"startingOffsetsByTimestampStrategy": "error"}):
        with pytest.raises(OptionInvalid) as caught:
            driver_of(scripted, clock, **given, **strategy).starting()
        assert caught.value.fields["option"] == option
        assert "orders/0 has no record that new" in caught.value.message
    late = driver_of(scripted, clock, **given, startingOffsetsByTimestampStrategy="latest")
    assert late.starting().offsets == {("orders", 0): 2, ("orders", 1): 0}


# ---- a stream for which nothing comes


@pytest.mark.parametrize(("answer_s", "looks_max"), [(0.0, 202), (0.01, 34), (0.5, 11)])
def test_an_idle_stream_asks_little_and_less_of_a_slow_broker(
    scripted: ScriptedKafka, clock: MovedClock, answer_s: float, looks_max: int
) -> None:
    def slow(answer: Any) -> Any:
        clock.now_s += answer_s
        return answer

    scripted.make("orders", Log().add(b"a"))
    driver = driver_of(scripted, clock)
    start = driver.latest(Position())
    scripted.plan(ListOffsetsRequest, *[slow] * 1_000)
    scripted.asked.clear()
    ends_s = clock.now_s + 10
    while clock.now_s < ends_s:
        # As often as Spark does.
        clock.now_s += 1 / 90
        assert driver.latest(start) == start
    assert 5 < scripted.asked[ListOffsetsRequest.API_KEY] <= looks_max
    assert scripted.asked[MetadataRequest.API_KEY] <= 11
    assert scripted.asked.total() <= looks_max + 11


def test_what_comes_is_seen_at_the_next_look(scripted: ScriptedKafka, clock: MovedClock) -> None:
    scripted.make("orders", Log().add(b"a"))
    driver = driver_of(scripted, clock)
    start = driver.latest(Position())
    scripted.topics["orders"][0].add(b"b")
    assert driver.latest(start) == start
    clock.now_s += POLL_S
    assert driver.latest(start).offsets == {("orders", 0): 2}
