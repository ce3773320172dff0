"""What GoQueue promises in its milestones 1 to 3, one test each, over real sockets."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh
from millstream.client import AsyncClient
from millstream.log.batch import decode, verify, walk


@pytest.fixture(scope="module")
def goqueue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("goqueue"))) as broker:
        v1 = V1(broker.wait_until_ready())
        yield v1
        v1.close()


def join(v1: V1, group: str, topic: str, **more: Any) -> dict[str, Any]:
    body = {"topics": [topic], "auto_offset_reset": "earliest", "auto_commit": False} | more
    page: dict[str, Any] = v1.good("POST", f"/groups/{group}/join", body)
    return page


def poll(v1: V1, group: str, member: dict[str, Any], **query: Any) -> list[Any]:
    query |= {"member_id": member["member_id"], "generation": member["generation"]}
    return [one["value"] for one in v1.good("GET", f"/groups/{group}/poll", **query)["messages"]]


def heartbeat(v1: V1, group: str, member: dict[str, Any]) -> dict[str, Any]:
    body = {"member_id": member["member_id"], "generation": member["generation"]}
    page: dict[str, Any] = v1.good("POST", f"/groups/{group}/heartbeat", body)
    return page


def held(member: dict[str, Any]) -> list[int]:
    return sorted(n for one in member["assignment"] for n in one["partitions"])


def segments(broker: BrokerProcess, topic: str, suffix: str) -> list[Path]:
    return sorted(Path(broker.data, "topics").glob(f"{topic}@*/0/*{suffix}"))


# ---- milestone 1: storage engine


def test_messages_are_stored_with_a_castagnoli_checksum(goqueue: V1) -> None:
    topic = goqueue.topic()
    goqueue.publish(topic, "checked")
    data = goqueue.call("GET", f"/topics/{topic}/partitions/0/batches").content
    [(position, header)] = walk(data)
    batch = data[position : position + header.size]
    assert verify(batch, bytes_max=1024).crc == header.crc
    assert decode(batch)[0].value == b"checked"


def test_the_log_rolls_over_to_a_new_segment(goqueue: V1) -> None:
    topic = goqueue.topic(segment_bytes=64 * 1024)
    for _ in range(40):
        goqueue.publish(topic, *["x" * 5000] * 20)
    assert goqueue.good("GET", f"/topics/{topic}")["details"][0]["segments"] > 1
    lines = goqueue.call(
        "GET", f"/topics/{topic}/messages", headers={"accept": "application/x-ndjson"}
    )
    assert len(lines.text.splitlines()) == 800


def test_segment_files_are_named_by_their_first_offset_in_twenty_digits(goqueue: V1) -> None:
    topic = goqueue.topic(segment_bytes=64 * 1024)
    for _ in range(40):
        goqueue.publish(topic, *["x" * 5000] * 20)

    def sealed() -> list[Path]:
        return [path.with_suffix("") for path in segments(goqueue.broker, topic, ".seal")]

    wait_until(sealed, "a sealed segment")
    logs = segments(goqueue.broker, topic, ".log")
    assert all(re.fullmatch(r"[0-9]{20}\.log", path.name) for path in logs)
    # As text and as numbers, the order is the same.
    assert [int(path.stem) for path in logs] == sorted(int(path.stem) for path in logs)
    # Sealed ones have a sparse index of offsets and one of times beside them.
    for path in sealed():
        assert path.with_suffix(".index").exists()
        assert path.with_suffix(".timeindex").exists()


def test_reading_begins_at_an_offset(goqueue: V1) -> None:
    topic = goqueue.topic()
    goqueue.publish(topic, *range(1000))
    for offset in (0, 1, 499, 999):
        assert goqueue.values(topic, offset=offset, limit=1) == [offset]


def test_messages_are_there_after_a_restart(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        v1.publish(topic, *range(10))
        v1.close()
        broker.process.kill()
        broker.process.wait(60)
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        assert v1.values(topic) == list(range(10))
        v1.close()


# ---- milestone 2: topics, partitions and the producer


def test_murmur3_routes_a_key_to_the_same_partition_every_time(goqueue: V1) -> None:
    topic = goqueue.topic(partitions=16, partitioner="murmur3")
    places = {
        key: {goqueue.publish(topic, n, key=key)[0]["partition"] for n in range(3)}
        for key in (f"user-{number}" for number in range(40))
    }
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) > 8
    # Of the reference implementation, 32 bits, seed 0: murmur3("hello") is 613153351.
    [placed] = goqueue.publish(topic, 1, key="hello")
    assert placed["partition"] == (613153351 & 0x7FFFFFFF) % 16


def test_messages_without_a_key_are_spread_evenly(goqueue: V1) -> None:
    topic = goqueue.topic(partitions=3)
    counts = Counter(
        goqueue.good("POST", f"/topics/{topic}/publish", {"value": "same"})["partition"]
        for _ in range(300)
    )
    assert sorted(counts) == [0, 1, 2]
    assert max(counts.values()) - min(counts.values()) <= 30


def test_a_partition_may_be_named(goqueue: V1) -> None:
    topic = goqueue.topic(partitions=3)
    for partition in (2, 0, 1, 1):
        assert goqueue.publish(topic, 1, key="k", partition=partition)[0]["partition"] == partition


def test_a_topic_has_three_partitions_by_default(goqueue: V1) -> None:
    topic = fresh("default")
    assert goqueue.good("POST", "/topics", {"name": topic})["partitions"] == 3


def test_the_producer_batches_by_count_bytes_and_linger(goqueue: V1) -> None:
    defaults = inspect.signature(AsyncClient.producer).parameters
    assert defaults["batch_records"].default == 100
    assert defaults["batch_bytes"].default == 64 * 1024
    assert defaults["linger_ms"].default == 5.0
    topic = goqueue.topic()

    async def scenario() -> tuple[int, int, int]:
        async with AsyncClient(goqueue.broker.url("")) as client:
            async with client.producer(linger_ms=600_000) as by_count:
                for delivery in [await by_count.send(topic, b"c") for _ in range(100)]:
                    await delivery
                counted = by_count.statistics().batches
            async with client.producer(linger_ms=600_000, batch_records=10**6) as by_bytes:
                deliveries = [await by_bytes.send(topic, b"b" * 1024) for _ in range(80)]
                await deliveries[0]
                sized = by_bytes.statistics().batches
            async with client.producer(batch_records=10**6) as by_time:
                await (await by_time.send(topic, b"t"))
                timed = by_time.statistics().batches
            return counted, sized, timed

    assert asyncio.run(scenario()) == (1, 1, 1)
    assert goqueue.good("GET", f"/topics/{topic}")["details"][0]["end"] == 181


@pytest.mark.parametrize(("acks", "status"), [("none", 202), ("leader", 200), ("all", 200)])
def test_there_are_three_modes_of_acknowledgement(goqueue: V1, acks: str, status: int) -> None:
    topic = goqueue.topic()
    answer = goqueue.call("POST", f"/topics/{topic}/publish", {"value": 1}, acks=acks)
    assert answer.status_code == status
    wait_until(lambda: goqueue.values(topic) == [1], "the message")


def test_topics_can_be_made_read_changed_and_deleted_over_http(goqueue: V1) -> None:
    topic = fresh("crud")
    assert goqueue.call("POST", "/topics", {"name": topic}).status_code == 201
    assert topic in [one["name"] for one in goqueue.good("GET", "/topics")["topics"]]
    changed = goqueue.good("PATCH", f"/topics/{topic}", {"settings": {"retention_ms": 60_000}})
    assert changed["settings"]["retention_ms"] == 60_000
    assert goqueue.call("DELETE", f"/topics/{topic}").status_code == 204
    assert goqueue.call("GET", f"/topics/{topic}").status_code == 404


@pytest.mark.parametrize("spelling", ["publish", "messages"])
def test_one_message_is_published_in_both_spellings(goqueue: V1, spelling: str) -> None:
    topic = goqueue.topic()
    goqueue.good("POST", f"/topics/{topic}/{spelling}", {"key": "k", "value": "v"})
    assert goqueue.values(topic) == ["v"]


def test_a_batch_is_published_at_once(goqueue: V1) -> None:
    topic = goqueue.topic()
    batch = {"messages": [{"value": number} for number in range(100)]}
    assert goqueue.good("POST", f"/topics/{topic}/batch", batch)["count"] == 100
    assert goqueue.values(topic) == list(range(100))


# ---- milestone 3: consumer groups and offsets


def test_a_member_that_sends_no_heartbeat_is_dropped(goqueue: V1) -> None:
    topic, group = goqueue.topic(partitions=2), fresh("silent")
    join(goqueue, group, topic, session_timeout_ms=500)
    lively = join(goqueue, group, topic)

    def has_all() -> bool:
        lively.update(heartbeat(goqueue, group, lively))
        return held(lively) == [0, 1]

    wait_until(has_all, "the partitions of the silent one")
    assert len(goqueue.good("GET", f"/groups/{group}")["members"]) == 1


def test_partitions_are_assigned_by_range(goqueue: V1) -> None:
    topic, group = goqueue.topic(partitions=5), fresh("range")
    members = [join(goqueue, group, topic, assignor="range") for _ in range(2)]

    def settled() -> bool:
        for member in members:
            member.update(heartbeat(goqueue, group, member))
        return not any(one["rebalancing"] or one["revoking"] for one in members)

    wait_until(settled, "the assignment")
    assert sorted(held(one) for one in members) == [[0, 1, 2], [3, 4]]


def test_a_zombie_with_an_old_generation_is_refused(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("zombie")
    goqueue.publish(topic, 1, 2)
    member = join(goqueue, group, topic, session_timeout_ms=500)
    zombie = dict(member)
    wait_until(
        lambda: not goqueue.good("GET", f"/groups/{group}")["members"], "the end of its session"
    )
    successor = join(goqueue, group, topic)
    offsets = [{"topic": topic, "partition": 0, "offset": 2}]
    body = {"member_id": zombie["member_id"], "generation": zombie["generation"]}
    answer = goqueue.call("POST", f"/groups/{group}/commit", body | {"offsets": offsets})
    assert answer.json()["error"] in ("member_unknown", "stale_generation")
    assert goqueue.call("POST", f"/groups/{group}/heartbeat", body).status_code in (404, 409)
    assert poll(goqueue, group, successor) == [1, 2]


def test_a_group_rebalances_when_members_come_and_go(goqueue: V1) -> None:
    topic, group = goqueue.topic(partitions=6), fresh("rebalance")
    members = [join(goqueue, group, topic) for _ in range(3)]

    def shared() -> bool:
        for member in members:
            member.update(heartbeat(goqueue, group, member))
        return sorted(n for one in members for n in held(one)) == list(range(6)) and not any(
            one["rebalancing"] for one in members
        )

    wait_until(shared, "each to have a part")
    assert [len(held(one)) for one in members] == [2, 2, 2]
    leaving = members.pop()
    goqueue.good("POST", f"/groups/{group}/leave", {"member_id": leaving["member_id"]})
    wait_until(shared, "the others to have it all")


def test_committed_offsets_survive_a_restart(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        v1.publish(topic, *range(5))
        member = join(v1, "durable", topic)
        assert poll(v1, "durable", member, limit=3) == [0, 1, 2]
        body = {
            "member_id": member["member_id"],
            "generation": member["generation"],
            "offsets": [{"topic": topic, "partition": 0, "offset": 3, "metadata": "batch 7"}],
        }
        v1.good("POST", "/groups/durable/commit", body)
        v1.close()
        broker.process.kill()
        broker.process.wait(60)
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        [offset] = v1.good("GET", "/groups/durable/offsets")["offsets"]
        assert (offset["offset"], offset["metadata"]) == (3, "batch 7")
        assert poll(v1, "durable", join(v1, "durable", topic)) == [3, 4]
        v1.close()


def test_offsets_are_committed_by_themselves(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("auto")
    goqueue.publish(topic, *range(3))
    member = join(goqueue, group, topic, auto_commit=True, auto_commit_interval_ms=50)
    assert poll(goqueue, group, member) == [0, 1, 2]

    def committed() -> bool:
        poll(goqueue, group, member)
        offsets = goqueue.good("GET", f"/groups/{group}/offsets")["offsets"]
        return [one["offset"] for one in offsets] == [3]

    wait_until(committed, "the commit")


def test_the_times_of_a_member_are_those_that_were_promised(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("times")
    member = join(goqueue, group, topic)
    assert (member["session_timeout_ms"], member["heartbeat_interval_ms"]) == (30_000, 3_000)
    shown = goqueue.broker.get("/openapi.json").json()["paths"]["/v1/groups/{group}/poll"]["get"]
    bounds = {one["name"]: one["schema"] for one in shown["parameters"]}
    assert (bounds["limit"]["maximum"], bounds["timeout"]["maximum"]) == (500, 30)


def test_a_member_id_is_the_client_id_and_random_hex(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("ids")
    ids = [join(goqueue, group, topic, client_id="worker")["member_id"] for _ in range(2)]
    assert all(re.fullmatch(r"worker-[0-9a-f]{8,}", id) for id in ids)
    assert ids[0] != ids[1]


def test_all_groups_are_in_one_place(goqueue: V1) -> None:
    topic = goqueue.topic()
    names = [fresh("listed") for _ in range(3)]
    for name in names:
        join(goqueue, name, topic)
    assert set(names) <= {one["group"] for one in goqueue.good("GET", "/groups")["groups"]}


def test_a_poll_waits_until_there_is_something(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("longpoll")
    member = join(goqueue, group, topic)
    found: list[Any] = []

    def wait() -> None:
        other = V1(goqueue.broker)
        found.extend(poll(other, group, member, timeout=30))
        other.close()

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(
        lambda: "millstream_http_waiting 1.0" in goqueue.call("GET", "/admin/metrics").text,
        "a poll that waits",
    )
    goqueue.publish(topic, "at last")
    thread.join(60)
    assert found == ["at last"]


# ---- the routes that its context lists


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/topics"),
        ("GET", "/v1/topics"),
        ("GET", "/v1/topics/{topic}"),
        ("DELETE", "/v1/topics/{topic}"),
        ("POST", "/v1/topics/{topic}/publish"),
        ("POST", "/v1/topics/{topic}/messages"),
        ("GET", "/v1/topics/{topic}/messages"),
        ("POST", "/v1/topics/{topic}/batch"),
        ("POST", "/v1/groups/{group}/join"),
        ("POST", "/v1/groups/{group}/leave"),
        ("POST", "/v1/groups/{group}/heartbeat"),
        ("GET", "/v1/groups/{group}/poll"),
        ("POST", "/v1/groups/{group}/commit"),
        ("GET", "/v1/admin/metrics"),
        ("GET", "/v1/admin/health"),
        ("GET", "/v1/admin/cluster"),
    ],
)
def test_a_route_is_there_and_described(goqueue: V1, method: str, path: str) -> None:
    described = goqueue.broker.get("/openapi.json").json()["paths"]
    assert method.lower() in described[path]
    real = path.replace("{topic}", fresh("none")).replace("{group}", "none").removeprefix("/v1")
    answer = goqueue.call(method, real)
    assert answer.status_code not in (405, 500, 501)
    assert answer.status_code != 404 or answer.json()["error"] != "not_found"


def test_the_admin_pages_tell_health_metrics_and_cluster(goqueue: V1) -> None:
    assert goqueue.good("GET", "/admin/health")["status"] == "healthy"
    assert "millstream_groups" in goqueue.call("GET", "/admin/metrics").text
    [node] = goqueue.good("GET", "/admin/cluster")["nodes"]
    assert (node["state"], node["is_leader"]) == ("ready", True)
