"""Groups of other people's Kafka clients: who joins, goes, dies and comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient, KafkaConsumer
from kafka import TopicPartition as PythonPartition

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from clients.crews import (
    Watched,
    committed,
    deal_out,
    fill,
    group_page,
    settings,
    turn_until,
    values,
)
from clients.making import KAFKA, free_port, make_topic

PARTITIONS = 6
VALUES = [b"%04d" % number for number in range(60)]
# Who deals out: the clients in three ways, or the broker.
WAYS: dict[str, dict[str, Any]] = {
    "range": {"partition_assignment_strategy": "range"},
    "roundrobin": {"partition_assignment_strategy": "roundrobin"},
    "cooperative": {"partition_assignment_strategy": "cooperative-sticky"},
    "consumer": {"group_protocol": "consumer"},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Where the broker deals out, it says how often members call, and how long they may not."""
    flags = ("--group-session-timeout", "2s", "--group-heartbeat-interval", "200ms")
    with BrokerProcess(str(tmp_path_factory.mktemp("broker")), *KAFKA, *flags) as one:
        yield one.wait_until_ready()


def test_five_that_start_together_make_few_rebalances(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "storm", 10)
    options = settings(broker, "storm")
    crew = [Watched(options, topic) for _ in range(5)]
    deal_out(10, *crew)
    assert group_page(broker, "storm")["generation"] <= 3
    for one in crew:
        one.close()


@pytest.mark.parametrize("way", ["range", "consumer"])
def test_a_pattern_finds_topics_that_are_made_later(broker: BrokerProcess, way: str) -> None:
    make_topic(broker, f"found-{way}-1", 1)
    member = Watched(settings(broker, f"finders-{way}", **WAYS[way]), f"^found-{way}.*")
    turn_until(lambda: len(member.consumer.assignment()) == 1, member)
    make_topic(broker, f"found-{way}-2", 2)
    turn_until(lambda: len(member.consumer.assignment()) == 3, member)
    member.close()


def test_with_cooperative_rebalancing_what_stays_is_never_taken_away(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "cooperative", PARTITIONS)
    options = settings(broker, "cooperative", **WAYS["cooperative"])
    a = Watched(options, topic)
    deal_out(PARTITIONS, a)
    b = Watched(options, topic)
    deal_out(PARTITIONS, a, b)
    assert [len(lost) for lost in a.lost if lost] == [3]
    assert set(a.numbers) <= {number for gained in a.gained for number in gained}
    a.close()
    deal_out(PARTITIONS, b)
    assert [lost for lost in b.lost if lost] == []
    b.close()


@pytest.mark.parametrize("way", ["range", "consumer"])
def test_a_static_member_comes_back_to_its_partitions_and_others_do_not_notice(
    broker: BrokerProcess, way: str
) -> None:
    topic = make_topic(broker, f"static-{way}", PARTITIONS)

    def options(name: str) -> dict[str, Any]:
        return settings(broker, f"static-{way}", group_instance_id=name, **WAYS[way])

    a, b = Watched(options("a"), topic), Watched(options("b"), topic)
    deal_out(PARTITIONS, a, b)
    had, told = b.numbers, len(a.gained)
    b.close()
    again = Watched(options("b"), topic)
    turn_until(lambda: again.numbers == had, a, again)
    assert len(a.gained) == told
    a.close()
    again.close()


def test_who_uses_an_instance_id_that_is_taken_over_is_fenced(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "fenced", PARTITIONS)
    options = settings(broker, "fenced", group_instance_id="one")
    old = Watched(options, topic)
    deal_out(PARTITIONS, old)
    new = Watched(options, topic)
    with pytest.raises(KafkaException) as refusal:
        turn_until(lambda: False, old, new)
    error: KafkaError = refusal.value.args[0]
    assert error.code() == KafkaError._FATAL or error.name() == "FENCED_INSTANCE_ID"
    old.close()
    new.close()


@pytest.mark.parametrize("way", ["range", "consumer"])
def test_what_was_committed_is_where_members_go_on_after_a_restart(
    tmp_path: Path, way: str
) -> None:
    flags = ("--kafka", f"127.0.0.1:{free_port()}")
    with BrokerProcess(str(tmp_path), *flags) as broker:
        broker.wait_until_ready()
        topic = make_topic(broker, "orders", 2)
        fill(broker, topic, VALUES[:20], 2)
        member = Watched(settings(broker, "crew", **WAYS[way]), topic)
        turn_until(lambda: len(member.messages) == 20, member)
        member.consumer.commit(
            offsets=[TopicPartition(topic, 0, 7, metadata="note"), TopicPartition(topic, 1, 10)],
            asynchronous=False,
        )
        broker.process.kill()
        broker.process.wait(PATIENCE_SECONDS)
    with BrokerProcess(str(tmp_path), *flags) as broker:
        broker.wait_until_ready()
        # The member finds that nobody knows it, joins again and goes on.
        fill(broker, topic, VALUES[20:30], 2)
        turn_until(lambda: len(member.messages) >= 30, member)
        member.close()
        late = Watched(settings(broker, "crew", **WAYS[way]), topic)
        turn_until(lambda: len(late.messages) >= 13, late)
        asked = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        kept = late.consumer.committed(asked, timeout=PATIENCE_SECONDS)
        assert [one.offset for one in kept] == [7, 10]
        assert (kept[0].metadata or "").rstrip("\0") == "note"
        assert values(late)[0] == b"0014"
        late.close()


def test_a_broker_stops_while_a_member_waits_for_the_others(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *KAFKA) as broker:
        broker.wait_until_ready()
        topic = make_topic(broker, "orders", 2)
        busy = Watched(settings(broker, "crew"), topic)
        deal_out(2, busy)
        # It waits for the first, which does not poll and so does not join again.
        waiting = Watched(settings(broker, "crew"), topic)
        wait_until(lambda: group_page(broker, "crew")["state"] == "rebalancing", "a rebalance")
        assert broker.stop() == 0
        assert broker.messages("requests cut off") == []
        waiting.close()
        busy.close()


def test_commits_of_one_who_only_borrows_the_name_are_refused_while_there_are_members(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "borrowed", 1)
    fill(broker, topic, VALUES[:5], 1)
    loner = Consumer(settings(broker, "borrowed"))
    loner.assign([TopicPartition(topic, 0, 0)])
    offsets = [TopicPartition(topic, 0, 3)]
    loner.commit(offsets=offsets, asynchronous=False)
    assert committed(loner, topic, 1) == [3]
    member = Watched(settings(broker, "borrowed"), topic)
    deal_out(1, member)
    with pytest.raises(KafkaException) as refusal:
        loner.commit(offsets=offsets, asynchronous=False)
    assert refusal.value.args[0].name() == "UNKNOWN_MEMBER_ID"
    member.close()
    loner.close()


def test_a_group_with_members_of_one_protocol_refuses_those_of_another(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "mixed", 2)
    member = Watched(settings(broker, "kafkas"), topic)
    deal_out(2, member)
    page = {"topics": [topic]}
    answer = httpx.post(broker.url("/v1/groups/kafkas/join"), json=page, timeout=PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["error"]) == (409, "group_protocol_mismatch")
    shown = group_page(broker, "kafkas")
    assert (shown["protocol"], shown["state"], len(shown["members"])) == ("classic", "stable", 1)
    assert shown["members"][0]["assignment"] == [{"topic": topic, "partitions": [0, 1]}]
    modern = Watched(settings(broker, "kafkas", group_protocol="consumer"), topic)
    with pytest.raises(KafkaException) as refusal:
        turn_until(lambda: False, modern)
    assert (
        "INCONSISTENT_GROUP_PROTOCOL" in str(refusal.value)
        or "inconsistent" in str(refusal.value).lower()
    )
    modern.close()
    member.close()

    joined = httpx.post(broker.url("/v1/groups/https/join"), json=page, timeout=PATIENCE_SECONDS)
    assert joined.status_code == 200
    late = Watched(settings(broker, "https"), topic)
    with pytest.raises(KafkaException) as refusal:
        turn_until(lambda: False, late)
    assert refusal.value.args[0].name() == "INCONSISTENT_GROUP_PROTOCOL"
    late.close()


def test_offsets_and_lag_are_the_same_over_http_and_a_group_may_go_on_there(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "shown", 2)
    fill(broker, topic, VALUES[:20], 2)
    member = Watched(settings(broker, "shown"), topic)
    deal_out(2, member)
    offsets = [TopicPartition(topic, 0, 4), TopicPartition(topic, 1, 10)]
    member.consumer.commit(offsets=offsets, asynchronous=False)
    shown = page_of(broker, "/v1/groups/shown/offsets")["offsets"]
    assert [(one["partition"], one["offset"]) for one in shown] == [(0, 4), (1, 10)]
    lag = page_of(broker, "/v1/groups/shown/lag")
    assert lag["messages"] == 6
    assert [one["messages"] for one in lag["partitions"]] == [6, 0]
    member.close()
    wait_until(lambda: group_page(broker, "shown")["members"] == [], "the member to have left")
    page = {"topics": [topic]}
    answer = httpx.post(broker.url("/v1/groups/shown/join"), json=page, timeout=PATIENCE_SECONDS)
    joined = answer.json()
    who = f"member_id={joined['member_id']}&generation={joined['generation']}"
    polled = page_of(broker, f"/v1/groups/shown/poll?{who}&limit=100&timeout=30")
    assert [one["value"] for one in polled["messages"]] == [one.decode() for one in VALUES[8:20:2]]


def page_of(broker: BrokerProcess, path: str) -> dict[str, Any]:
    answer = httpx.get(broker.url(path), timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_administrators_see_groups_move_their_offsets_and_delete_them(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "seen", 2)
    fill(broker, topic, VALUES[:10], 2)
    admin = AdminClient({"bootstrap.servers": broker.kafka})
    member = Watched(settings(broker, "seen", client_id="me"), topic)
    turn_until(lambda: len(member.messages) == 10, member)
    member.commit()
    listed = {one.group_id: one for one in admin.list_consumer_groups().result().valid}
    assert listed["seen"].state == ConsumerGroupState.STABLE
    described = admin.describe_consumer_groups(["seen"])["seen"].result()
    assert (described.partition_assignor, described.state) == ("range", ConsumerGroupState.STABLE)
    (one,) = described.members
    assert one.client_id == "me"
    assert [part.partition for part in one.assignment.topic_partitions] == [0, 1]
    with pytest.raises(KafkaException) as refusal:
        admin.delete_consumer_groups(["seen"])["seen"].result()
    assert refusal.value.args[0].name() == "NON_EMPTY_GROUP"
    member.close()
    moved = ConsumerGroupTopicPartitions("seen", [TopicPartition(topic, 0, 2)])
    admin.alter_consumer_group_offsets([moved])["seen"].result()
    asked = ConsumerGroupTopicPartitions("seen")
    kept = admin.list_consumer_group_offsets([asked])["seen"].result().topic_partitions
    assert sorted((part.partition, part.offset) for part in kept) == [(0, 2), (1, 5)]
    admin.delete_consumer_groups(["seen"])["seen"].result()
    assert "seen" not in {one.group_id for one in admin.list_consumer_groups().result().valid}
    gone = admin.describe_consumer_groups(["seen"])["seen"].result()
    assert gone.state == ConsumerGroupState.DEAD


# ---- aiokafka


@pytest.mark.parametrize("count", [1, 3])
def test_aiokafka_members_share_and_resume(broker: BrokerProcess, count: int) -> None:
    topic = make_topic(broker, f"aio-crew-{count}", PARTITIONS)
    fill(broker, topic, VALUES, PARTITIONS)

    async def consumer() -> AIOKafkaConsumer:
        one = AIOKafkaConsumer(
            topic,
            bootstrap_servers=broker.kafka,
            group_id=f"aio-{count}",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=3000,
            heartbeat_interval_ms=200,
        )
        await one.start()
        return one

    async def read(one: AIOKafkaConsumer, found: list[bytes]) -> None:
        while len(found) < len(VALUES):
            batches = await one.getmany(timeout_ms=200)
            found += [record.value for records in batches.values() for record in records]
        await one.commit()

    async def scenario() -> None:
        crew = [await consumer() for _ in range(count)]
        found: list[bytes] = []
        await asyncio.wait_for(
            asyncio.gather(*(read(one, found) for one in crew)), PATIENCE_SECONDS
        )
        assert set(found) == {*VALUES}
        for one in crew:
            await one.stop()
        late = await consumer()
        kept = [await late.committed(one) for one in late.assignment()]
        assert sum(kept) == len(VALUES)
        await late.stop()

    asyncio.run(scenario())


# ---- kafka-python


def test_kafka_python_members_share_and_resume(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "python-crew", PARTITIONS)
    fill(broker, topic, VALUES, PARTITIONS)
    found: list[bytes] = []
    shares: list[set[int]] = [set(), set()]

    def work(place: int) -> None:
        consumer = _python_consumer(broker, topic)
        try:
            while len({*found}) < len(VALUES):
                for records in consumer.poll(timeout_ms=200).values():
                    found.extend(record.value for record in records)
                shares[place] |= {one.partition for one in consumer.assignment()}
            consumer.commit()
        finally:
            consumer.close()

    workers = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(PATIENCE_SECONDS)
    assert {*found} == {*VALUES}
    assert shares[0] | shares[1] == set(range(PARTITIONS))
    late = _python_consumer(broker, topic)
    try:
        kept = [late.committed(PythonPartition(topic, number)) for number in range(PARTITIONS)]
        assert all(offset is not None and 0 < offset <= 10 for offset in kept)
    finally:
        late.close()


def _python_consumer(broker: BrokerProcess, topic: str) -> KafkaConsumer:
    return KafkaConsumer(
        topic,
        bootstrap_servers=broker.kafka,
        group_id="python-crew",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=6000,
        heartbeat_interval_ms=300,
    )


def test_kafka_python_describes_lists_and_deletes_groups(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "python-seen", 2)
    member = Watched(settings(broker, "python-seen", client_id="me"), topic)
    deal_out(2, member)
    admin = KafkaAdminClient(bootstrap_servers=broker.kafka)
    try:
        assert "python-seen" in {one["group_id"] for one in admin.list_groups()}
        described = admin.describe_groups(["python-seen"])["python-seen"]
        assert described["group_state"] == "Stable"
        assert [one["client_id"] for one in described["members"]] == ["me"]
        member.close()
        admin.delete_groups(["python-seen"])
        assert "python-seen" not in {one["group_id"] for one in admin.list_groups()}
    finally:
        admin.close()
