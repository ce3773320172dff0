"""Groups and sequential consumers over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker"))) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


class Member:
    """A member that says what it must."""

    def __init__(self, v1: V1, group: str, *topics: str, **more: Any) -> None:
        self.v1 = v1
        self.group = group
        body = {"topics": list(topics), "auto_offset_reset": "earliest", "auto_commit": False}
        self._see(v1.good("POST", f"/groups/{group}/join", body | more))

    def _see(self, page: dict[str, Any]) -> dict[str, Any]:
        self.id: str = page["member_id"]
        self.generation: int = page["generation"]
        self.assignment = {one["topic"]: one["partitions"] for one in page["assignment"]}
        self.is_rebalancing: bool = page["rebalancing"]
        return page

    def heartbeat(self) -> dict[str, Any]:
        body = {"member_id": self.id, "generation": self.generation}
        return self._see(self.v1.good("POST", f"/groups/{self.group}/heartbeat", body))

    def poll(self, **query: Any) -> dict[str, Any]:
        query |= {"member_id": self.id, "generation": self.generation}
        return self._see(self.v1.good("GET", f"/groups/{self.group}/poll", **query))

    def commit(self, topic: str, **offsets: int) -> Any:
        return self.v1.good(
            "POST", f"/groups/{self.group}/commit", self.commit_body(topic, offsets)
        )

    def commit_body(self, topic: str, offsets: dict[str, int]) -> dict[str, Any]:
        return {
            "member_id": self.id,
            "generation": self.generation,
            "offsets": [
                {"topic": topic, "partition": int(name[1:]), "offset": offset}
                for name, offset in offsets.items()
            ],
        }

    def leave(self) -> None:
        self.v1.good("POST", f"/groups/{self.group}/leave", {"member_id": self.id})


def test_a_commit_that_names_a_partition_twice_is_refused(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, "a", "b")
    offsets = [{"topic": topic, "partition": 0, "offset": offset} for offset in (1, 2)]
    v1.refused(400, "body_invalid", "POST", "/groups/twice/commit", {"offsets": offsets})
    v1.refused(404, "group_unknown", "GET", "/groups/twice")


def test_a_member_joins_polls_commits_and_leaves(v1: V1) -> None:
    topic, group = v1.topic(partitions=2), fresh("group")
    v1.publish(topic, "a", "b", partition=0)
    v1.publish(topic, "c", partition=1)
    member = Member(v1, group, topic, client_id="worker")
    assert member.id.startswith("worker-")
    assert member.assignment == {topic: [0, 1]}
    page = member.poll()
    assert sorted((one["topic"], one["value"]) for one in page["messages"]) == [
        (topic, "a"),
        (topic, "b"),
        (topic, "c"),
    ]
    assert {(one["partition"], one["next_offset"], one["end"]) for one in page["parts"]} == {
        (0, 2, 2),
        (1, 1, 1),
    }
    assert member.commit(topic, p0=2, p1=1) == {"group": group, "committed": 2}
    offsets = v1.good("GET", f"/groups/{group}/offsets", topic=topic)["offsets"]
    assert [(one["partition"], one["offset"]) for one in offsets] == [(0, 2), (1, 1)]
    member.leave()
    again = Member(v1, group, topic)
    assert again.poll()["messages"] == []
    again.leave()


def test_a_poll_waits_for_a_message(v1: V1) -> None:
    topic, group = v1.topic(partitions=2), fresh("group")
    member = Member(v1, group, topic)
    found: list[Any] = []

    def poll() -> None:
        other = V1(v1.broker)
        query = {"member_id": member.id, "generation": member.generation, "timeout": 30}
        found.extend(other.good("GET", f"/groups/{group}/poll", **query)["messages"])
        other.close()

    thread = threading.Thread(target=poll)
    thread.start()
    wait_until(
        lambda: "millstream_http_waiting 1.0" in v1.call("GET", "/admin/metrics").text,
        "a poll that waits",
    )
    v1.publish(topic, "news")
    thread.join(60)
    assert [one["value"] for one in found] == ["news"]
    member.leave()


def test_an_answer_that_was_lost_comes_again(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, 1, 2, 3)
    member = Member(v1, group, topic)
    first = member.poll(limit=2)
    lost = member.poll(limit=2, received=first["number"])
    again = member.poll(limit=2, received=first["number"])
    assert [one["value"] for one in lost["messages"]] == [3]
    assert [one["value"] for one in again["messages"]] == [3]
    member.leave()


def test_partitions_move_to_a_member_that_joins_and_back(v1: V1) -> None:
    topic, group = v1.topic(partitions=4), fresh("group")
    first = Member(v1, group, topic)
    second = Member(v1, group, topic)

    def settled(*members: Member) -> bool:
        for member in members:
            member.heartbeat()
        held = [n for member in members for n in member.assignment.get(topic, [])]
        return sorted(held) == [0, 1, 2, 3] and not any(one.is_rebalancing for one in members)

    wait_until(lambda: settled(first, second), "both members to have theirs")
    assert len(first.assignment[topic]) == len(second.assignment[topic]) == 2
    second.leave()
    wait_until(lambda: settled(first), "the first to have all")
    first.leave()


def test_a_stale_member_is_told_so_and_changes_nothing(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, 1, 2, 3)
    member = Member(v1, group, topic)
    member.commit(topic, p0=1)
    commit = f"/groups/{group}/commit"
    body = member.commit_body(topic, {"p0": 3})
    v1.refused(409, "stale_generation", "POST", commit, body | {"generation": 10**6})
    leave = {"member_id": member.id, "generation": 10**6}
    v1.refused(409, "stale_generation", "POST", f"/groups/{member.group}/leave", leave)
    v1.refused(404, "member_unknown", "POST", commit, body | {"member_id": "ghost-1"})
    v1.refused(
        404,
        "member_unknown",
        "POST",
        f"/groups/{group}/heartbeat",
        {"member_id": "ghost-1", "generation": 1},
    )
    v1.refused(
        404, "member_unknown", "GET", f"/groups/{group}/poll", member_id="ghost-1", generation=1
    )
    [offset] = v1.good("GET", f"/groups/{group}/offsets")["offsets"]
    assert offset["offset"] == 1
    member.leave()


def test_groups_are_listed_described_reset_and_deleted(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, *range(10), timestamp_ms=5000)
    v1.publish(topic, 10, timestamp_ms=9000)
    member = Member(v1, group, topic, client_id="seen")
    member.commit(topic, p0=4)
    [listed] = [one for one in v1.good("GET", "/groups")["groups"] if one["group"] == group]
    assert (listed["state"], listed["members"], listed["topics"]) == ("stable", 1, [topic])
    page = v1.good("GET", f"/groups/{group}")
    assert page["members"][0]["client_id"] == "seen"
    assert page["members"][0]["assignment"] == [{"topic": topic, "partitions": [0]}]
    assert page["offsets"][0]["offset"] == 4
    lag = v1.good("GET", f"/groups/{group}/lag")
    assert (lag["messages"], lag["partitions"][0]["messages"]) == (7, 7)
    assert lag["seconds"] > 0
    reset = f"/groups/{group}/reset"
    v1.refused(409, "group_not_empty", "POST", reset, {"topic": topic, "to": "earliest"})
    v1.refused(409, "group_not_empty", "DELETE", f"/groups/{group}")
    member.leave()
    for body, after in (
        ({"to": "earliest", "dry_run": True}, 0),
        ({"to": "latest"}, 11),
        ({"to": "time", "time_ms": 6000}, 10),
        ({"to": "offset", "offset": 3, "partitions": [0]}, 3),
        ({"to": "earliest"}, 0),
    ):
        assert v1.good("POST", reset, {"topic": topic} | body)["offsets"][0]["after"] == after
    assert v1.good("GET", f"/groups/{group}/offsets")["offsets"][0]["offset"] == 0
    forgotten = v1.good("DELETE", f"/groups/{group}/offsets", topic=topic)
    assert forgotten == {"group": group, "forgotten": 1}
    v1.good("POST", reset, {"topic": topic, "to": "latest"})
    assert v1.call("DELETE", f"/groups/{group}").status_code == 204
    v1.refused(404, "group_unknown", "GET", f"/groups/{group}")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"to": "time"}, 400, "body_invalid"),
        ({"to": "offset"}, 400, "body_invalid"),
        ({"to": "middle"}, 400, "body_invalid"),
        ({"to": "time", "time_ms": -1}, 400, "timestamp_invalid"),
        ({"to": "latest", "time_ms": 2**63}, 400, "timestamp_invalid"),
        ({"to": "offset", "offset": -1}, 416, "offset_out_of_range"),
        ({"to": "offset", "offset": 7}, 416, "offset_out_of_range"),
        ({"to": "latest", "partitions": []}, 400, "body_invalid"),
        ({"to": "latest", "partitions": [0, 0]}, 400, "body_invalid"),
        ({"to": "latest", "partitions": [1]}, 404, "partition_unknown"),
        ({"to": "latest", "partitions": [-1]}, 404, "partition_unknown"),
        ({"to": "latest", "topic": "nowhere"}, 404, "topic_unknown"),
    ],
)
def test_a_reset_out_of_range_is_refused(v1: V1, body: Any, status: int, code: str) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.refused(status, code, "POST", f"/groups/{group}/reset", {"topic": topic} | body)
    v1.refused(404, "group_unknown", "GET", f"/groups/{group}")


def test_offsets_may_be_committed_without_a_member(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, 1, 2)
    offsets = [{"topic": topic, "partition": 0, "offset": 1, "metadata": "by hand"}]
    v1.good("POST", f"/groups/{group}/commit", {"offsets": offsets})
    [found] = v1.good("GET", f"/groups/{group}/offsets")["offsets"]
    assert (found["offset"], found["metadata"]) == (1, "by hand")
    member = Member(v1, group, topic)
    v1.refused(409, "group_not_empty", "POST", f"/groups/{group}/commit", {"offsets": offsets})
    assert [one["value"] for one in member.poll()["messages"]] == [2]
    member.leave()


def test_bad_commits_have_codes_of_their_own_and_commit_nothing(v1: V1) -> None:
    topic, group = v1.topic(partitions=2), fresh("group")
    v1.publish(topic, 1, partition=0)
    good = {"topic": topic, "partition": 0, "offset": 1}
    other = good | {"partition": 1, "offset": 0}
    path = f"/groups/{group}/commit"
    for bad, status, code in (
        ({"offset": -1}, 416, "offset_out_of_range"),
        ({"offset": 2**63}, 416, "offset_out_of_range"),
        ({"partition": 2}, 404, "partition_unknown"),
        ({"partition": -1}, 404, "partition_unknown"),
        ({"topic": "nowhere"}, 404, "topic_unknown"),
        ({"metadata": "x" * 5000}, 413, "metadata_too_large"),
    ):
        v1.refused(status, code, "POST", path, {"offsets": [good, other | bad]})
    bodies: list[dict[str, Any]] = [
        {},
        {"offsets": []},
        {"offsets": [good], "member_id": "x"},
        {"offsets": [{}]},
    ]
    for body in bodies:
        v1.refused(400, "body_invalid", "POST", path, body)
    v1.refused(404, "group_unknown", "GET", f"/groups/{group}")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"topics": []}, 400, "parameter_invalid"),
        ({"topics": ["nowhere"]}, 404, "topic_unknown"),
        ({"topics": ["__offsets"]}, 403, "topic_reserved"),
        ({}, 400, "body_invalid"),
        ({"topics": ["t"], "assignor": "best"}, 400, "body_invalid"),
        ({"topics": ["t"], "auto_offset_reset": "middle"}, 400, "body_invalid"),
        ({"topics": ["t"], "session_timeout_ms": 1}, 400, "parameter_invalid"),
        ({"topics": ["t"], "session_timeout_ms": 10**9}, 400, "parameter_invalid"),
        ({"topics": ["t"], "client_id": "a b"}, 400, "parameter_invalid"),
        ({"topics": ["t"], "client_id": "x" * 201}, 400, "parameter_invalid"),
        ({"topics": ["t"], "what": 1}, 400, "body_invalid"),
    ],
)
def test_what_cannot_join_is_refused(v1: V1, body: Any, status: int, code: str) -> None:
    group = fresh("group")
    v1.good("POST", "/topics/t/messages", {"value": 1})
    v1.refused(status, code, "POST", f"/groups/{group}/join", body)
    v1.refused(404, "group_unknown", "GET", f"/groups/{group}")


@pytest.mark.parametrize("name", ["a%20b", "x" * 256, "__mine", "%C3%BC"])
def test_a_bad_name_of_a_group_is_refused(v1: V1, name: str) -> None:
    v1.refused(400, "group_name_invalid", "POST", f"/groups/{name}/join", {"topics": ["t"]})


@pytest.mark.parametrize(
    "query",
    [
        "generation=1", "member_id=m", "member_id=m&generation=x", "member_id=m&generation=-1",
        "member_id=m&generation=1&limit=0", "member_id=m&generation=1&limit=501",
        "member_id=m&generation=1&timeout=31", "member_id=m&generation=1&received=-1",
        "member_id=m&generation=2147483648",
    ],
)  # fmt: skip
def test_a_parameter_of_a_poll_out_of_range_is_refused(v1: V1, query: str) -> None:
    topic, group = v1.topic(), fresh("group")
    member = Member(v1, group, topic)
    v1.refused(
        400,
        "parameter_invalid",
        "GET",
        f"/groups/{group}/poll?{query.replace('member_id=m', f'member_id={member.id}')}",
    )
    member.leave()


def test_a_new_group_starts_at_latest_and_none_is_told(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, "before")
    latest = Member(v1, fresh("group"), topic, auto_offset_reset=None)
    assert latest.poll()["messages"] == []
    v1.publish(topic, "after")
    assert [one["value"] for one in latest.poll()["messages"]] == ["after"]
    strict = Member(v1, fresh("group"), topic, auto_offset_reset="none")
    query = {"member_id": strict.id, "generation": strict.generation}
    v1.refused(404, "offset_unknown", "GET", f"/groups/{strict.group}/poll", **query)
    latest.leave()
    strict.leave()


def test_a_stop_answers_polls_that_wait(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        member = Member(v1, "g", topic)
        found: list[Any] = []

        def poll() -> None:
            other = V1(broker)
            query = {"member_id": member.id, "generation": member.generation, "timeout": 30}
            found.append(other.good("GET", "/groups/g/poll", **query)["messages"])
            other.close()

        thread = threading.Thread(target=poll)
        thread.start()
        wait_until(
            lambda: "millstream_http_waiting 1.0" in v1.call("GET", "/admin/metrics").text,
            "a poll that waits",
        )
        v1.close()
        assert broker.stop() == 0
        thread.join(60)
        assert found == [[]]


# ---- sequential consumers


def test_a_consumer_goes_on_at_the_first_message_it_has_not_acked(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, *range(5))
    consumers = f"/topics/{topic}/consumers"
    made = v1.call("POST", consumers, {})
    assert made.status_code == 201
    id = made.json()["consumer_id"]

    def following(**query: Any) -> list[Any]:
        answer = v1.call("GET", f"{consumers}/{id}/next", **query)
        return [one["value"] for one in answer.json()["messages"]] if answer.content else []

    assert following() == [0]
    assert following(limit=2) == [1, 2]
    acked = v1.good("POST", f"{consumers}/{id}/ack", {"partition": 0, "offset": 1})
    assert acked == {"topic": topic, "consumer_id": id, "partition": 0, "position": 2}
    back = v1.call("POST", consumers, {"consumer_id": id})
    assert (back.status_code, back.json()["positions"]) == (200, [{"partition": 0, "offset": 2}])
    assert following(limit=10) == [2, 3, 4]
    assert v1.call("GET", f"{consumers}/{id}/next").status_code == 204
    v1.refused(
        416, "offset_out_of_range", "POST", f"{consumers}/{id}/ack", {"partition": 0, "offset": 5}
    )
    v1.refused(
        404, "partition_unknown", "POST", f"{consumers}/{id}/ack", {"partition": 1, "offset": 0}
    )
    assert v1.call("DELETE", f"{consumers}/{id}").status_code == 204
    v1.refused(404, "consumer_unknown", "GET", f"{consumers}/{id}/next")


def test_a_consumer_waits_for_a_message(v1: V1) -> None:
    topic = v1.topic()
    consumers = f"/topics/{topic}/consumers"
    id = v1.good("POST", consumers, {"start": "latest"})["consumer_id"]
    found: list[Any] = []

    def read() -> None:
        other = V1(v1.broker)
        found.append(other.good("GET", f"{consumers}/{id}/next", timeout=30))
        other.close()

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(
        lambda: "millstream_http_waiting 1.0" in v1.call("GET", "/admin/metrics").text,
        "a consumer that waits",
    )
    v1.publish(topic, "news")
    thread.join(60)
    assert [one["value"] for one in found[0]["messages"]] == ["news"]


def test_nobody_names_a_consumer_but_the_broker(v1: V1) -> None:
    topic = v1.topic()
    consumers = f"/topics/{topic}/consumers"
    v1.refused(404, "consumer_unknown", "POST", consumers, {"consumer_id": "mine"})
    v1.refused(404, "consumer_unknown", "POST", consumers, {"consumer_id": "0" * 24})
    v1.refused(416, "offset_out_of_range", "POST", consumers, {"start": 7})
    v1.refused(404, "partition_unknown", "POST", consumers, {"partition": 1})
    v1.refused(400, "body_invalid", "POST", consumers, {"start": "middle"})
