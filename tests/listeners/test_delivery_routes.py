"""Work queues over HTTP: receives, settlings, and what is known of them."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh

FLAGS = ("--member-inflight-max", "5", "--receive-records-max", "20", "--retry-delay", "0s")


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker")), *FLAGS) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


class Worker:
    """A group's worker on a topic of its own."""

    def __init__(self, v1: V1, *values: Any, **settings: Any) -> None:
        self.v1 = v1
        self.topic = v1.topic(**settings)
        self.group = fresh("group")
        if values:
            v1.publish(self.topic, *values)

    def ask(self, **how: Any) -> Any:
        path = f"/groups/{self.group}/receive"
        return self.v1.good("POST", path, {"topics": [self.topic]} | how)

    def receive(self, **how: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask(**({"limit": 20} | how))["messages"]
        return found

    def one(self, **how: Any) -> dict[str, Any]:
        (message,) = self.receive(limit=1, **how)
        return message

    def leases(self, **query: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.v1.good("GET", f"/groups/{self.group}/leases", **query)[
            "leases"
        ]
        return found

    def stats(self) -> dict[str, Any]:
        page = self.v1.good("GET", "/reliability/stats", group=self.group)
        (group,) = page["groups"]
        found: dict[str, Any] = group
        return found


def settle(v1: V1, word: str, receipt: str, **how: Any) -> dict[str, Any]:
    page: dict[str, Any] = v1.good("POST", f"/messages/{word}", {"receipt": receipt} | how)
    return page


def test_a_message_is_received_with_its_receipt_and_acked(v1: V1) -> None:
    worker = Worker(v1)
    v1.publish(worker.topic, {"n": 1}, key="k", headers={"trace": "7"})
    page = worker.ask()
    (message,) = page["messages"]
    assert page["group"] == worker.group
    assert page["limited_by"] is None
    assert page["deadline_ms"] > message["timestamp_ms"]
    receipt = message.pop("receipt")
    assert receipt.split(":")[:4] == [worker.topic, "0", "0", "1"]
    assert receipt.endswith(f":{worker.group}")
    del message["timestamp_ms"]
    assert message == {
        "topic": worker.topic,
        "partition": 0,
        "offset": 0,
        "key": "k",
        "value": {"n": 1},
        "lane": "normal",
        "headers": {"trace": "7"},
        "deliveries": 1,
    }
    assert worker.receive() == []
    assert settle(v1, "ack", receipt) == {"outcome": "acked"}
    assert worker.leases() == []
    offsets = v1.good("GET", f"/groups/{worker.group}/offsets")["offsets"]
    assert [(one["partition"], one["offset"]) for one in offsets] == [(0, 1)]


def test_values_that_are_no_text_come_in_base64_and_json_as_json(v1: V1) -> None:
    worker = Worker(v1)
    body = {"messages": [
        {"value": "/w==", "encoding": "base64", "key": "gA==", "key_encoding": "base64"},
        {"value": 'a"b'}, {"value": [1]}, {"value": None, "key": "gone"},
    ]}  # fmt: skip
    v1.good("POST", f"/topics/{worker.topic}/batch", body)
    first, second, third, fourth = worker.receive()
    assert (first["value"], first["encoding"]) == ("/w==", "base64")
    assert (first["key"], first["key_encoding"]) == ("gA==", "base64")
    assert (second["value"], third["value"], fourth["value"]) == ('a"b', [1], None)


def test_each_way_to_settle_does_what_it_says(v1: V1) -> None:
    worker = Worker(v1, "a", "b", "c", "d")
    a, b, c, d = worker.receive()
    nacked = settle(v1, "nack", a["receipt"], delay_ms=3_600_000, error="not today")
    assert nacked["outcome"] == "retried"
    assert nacked["when_ms"] > a["timestamp_ms"] + 3_000_000
    assert settle(v1, "release", b["receipt"]) == {"outcome": "released"}
    assert settle(v1, "reject", c["receipt"], error="nonsense")["outcome"] == "dead"
    extended = settle(v1, "visibility", d["receipt"], visibility_ms=3_600_000)
    assert extended["outcome"] == "extended"
    assert extended["when_ms"] > d["timestamp_ms"] + 3_000_000
    leases = {one["offset"]: one for one in worker.leases()}
    assert {offset: one["state"] for offset, one in leases.items()} == {
        0: "waiting",
        1: "ready",
        3: "leased",
    }
    assert leases[1]["deliveries"] == 0
    assert leases[3]["when_ms"] == extended["when_ms"]
    (again,) = worker.receive()
    assert (again["value"], again["deliveries"]) == ("b", 1)
    (dead,) = v1.good("GET", f"/topics/{worker.topic}.dlq/messages")["messages"]
    headers = dead["headers"]
    assert dead["value"] == "c"
    assert headers["ms-dead-error"] == "nonsense"
    assert headers["ms-dead-reason"] == "rejected"
    assert (headers["ms-dead-topic"], headers["ms-dead-offset"]) == (worker.topic, "2")
    counts = worker.stats()
    names = ("delivered", "nacked", "released", "rejected", "extended", "dead", "acked")
    assert {name: counts[name] for name in names} == {
        "delivered": 5, "nacked": 1, "released": 1, "rejected": 1, "extended": 1, "dead": 1,
        "acked": 0,
    }  # fmt: skip


def test_a_nack_without_a_delay_comes_back_counted_until_the_last_delivery(v1: V1) -> None:
    worker = Worker(v1, "a", deliveries_max=2)
    first = worker.one()
    assert settle(v1, "nack", first["receipt"], error="once")["outcome"] == "retried"
    second = worker.one(wait_ms=30_000)
    assert second["deliveries"] == 2
    assert settle(v1, "nack", second["receipt"], error="twice")["outcome"] == "dead"
    assert worker.receive() == []


def test_many_are_settled_in_one_request_each_with_its_result(v1: V1) -> None:
    worker = Worker(v1, "a", "b", "c")
    a, b, c = (one["receipt"] for one in worker.receive())
    settle(v1, "ack", b)
    page = v1.good("POST", "/messages/ack", {"receipts": [a, b, "nonsense", c]})
    assert (page["settled"], page["refused"]) == (2, 2)
    assert page["results"][0] == page["results"][3] == {"outcome": "acked"}
    assert [one["error"] for one in page["results"][1:3]] == ["receipt_stale", "receipt_invalid"]
    assert page["results"][1]["receipt"] == b
    assert all(one["message"] for one in page["results"][1:3])


def test_one_request_settles_in_several_ways(v1: V1) -> None:
    worker = Worker(v1, "a", "b", "c", "d", "e")
    receipts = [one["receipt"] for one in worker.receive()]
    kinds = ("ack", "nack", "release", "reject", "extend")
    settles: list[dict[str, Any]] = [
        {"kind": kind, "receipt": receipt} for kind, receipt in zip(kinds, receipts, strict=True)
    ]
    settles[1] |= {"delay_ms": 3_600_000, "error": "later"}
    settles[3] |= {"error": "never"}
    settles[4] |= {"visibility_ms": 60_000}
    page = v1.good("POST", f"/groups/{worker.group}/settle", {"settles": settles})
    assert [one["outcome"] for one in page["results"]] == [
        "acked", "retried", "released", "dead", "extended",
    ]  # fmt: skip
    again = v1.good("POST", "/messages/settle", {"settles": settles})
    assert again["refused"] == 4
    assert [one.get("error", "") for one in again["results"]] == [
        "receipt_stale", "receipt_stale", "receipt_stale", "receipt_stale", "",
    ]  # fmt: skip


WORDS = ("ack", "nack", "release", "reject", "visibility")


@pytest.mark.parametrize("word", WORDS)
def test_stale_foreign_and_made_up_receipts_have_a_code_each(v1: V1, word: str) -> None:
    worker, other = Worker(v1, "a", "b"), fresh("group")
    receipt, acked = (one["receipt"] for one in worker.receive())
    settle(v1, "ack", acked)

    def refused(status: int, code: str, text: str, group: str | None = None) -> None:
        path = f"/messages/{word}" if group is None else f"/groups/{group}/{word}"
        page = v1.refused(status, code, "POST", path, {"receipt": text})
        assert page["receipt"] == text

    refused(409, "receipt_stale", acked)
    topic, partition, offset, count, nonce, group = receipt.split(":")
    stolen = ":".join((topic, partition, offset, count, "0" * len(nonce), group))
    refused(409, "receipt_stale", stolen)
    refused(404, "receipt_unknown", receipt, other)
    refused(404, "receipt_unknown", f"{topic}:7:{offset}:{count}:{nonce}:{group}")
    refused(404, "receipt_unknown", f"{topic}:{partition}:900:{count}:{nonce}:{group}")
    refused(404, "receipt_unknown", f"{topic}:{partition}:{offset}:9:{nonce}:{group}")
    refused(404, "receipt_unknown", f"{topic}:{partition}:{offset}:{count}:{nonce}:{other}")
    refused(400, "receipt_invalid", "x")
    refused(400, "receipt_invalid", receipt.replace(":0:", ":zero:", 1))
    # None of that did anything.
    path = f"/groups/{worker.group}/{word}"
    assert v1.good("POST", path, {"receipt": receipt})["outcome"]


def test_a_lease_that_ran_out_makes_its_receipt_stale_and_the_message_comes_again(v1: V1) -> None:
    worker = Worker(v1, "a")
    first = worker.one(visibility_ms=100)
    second = worker.one(wait_ms=30_000)
    assert (first["deliveries"], second["deliveries"]) == (1, 2)
    v1.refused(409, "receipt_stale", "POST", "/messages/ack", {"receipt": first["receipt"]})
    assert settle(v1, "ack", second["receipt"])["outcome"] == "acked"
    counts = worker.stats()
    assert (counts["timeouts"], counts["redelivered"], counts["refused"]) == (1, 1, 1)


def test_a_receive_waits_for_a_message(v1: V1) -> None:
    worker = Worker(v1)
    found: list[Any] = []

    def receive() -> None:
        other = V1(v1.broker)
        body = {"topics": [worker.topic], "wait_ms": 30_000}
        found.extend(other.good("POST", f"/groups/{worker.group}/receive", body)["messages"])
        other.close()

    thread = threading.Thread(target=receive)
    thread.start()
    wait_until(lambda: _waiting(v1) == 1, "a receive that waits")
    v1.publish(worker.topic, "news")
    thread.join(60)
    assert [one["value"] for one in found] == ["news"]
    assert _waiting(v1) == 0


def test_a_client_that_goes_away_while_it_waits_takes_nothing_along(v1: V1) -> None:
    worker = Worker(v1)
    host, port = v1.broker.url("").removeprefix("http://").rsplit(":", 1)
    body = json.dumps({"topics": [worker.topic], "wait_ms": 30_000}).encode()
    gone = socket.create_connection((host, int(port)))
    gone.sendall(
        b"POST /v1/groups/%b/receive HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
        % (worker.group.encode(), len(body), body)
    )
    wait_until(lambda: _waiting(v1) == 1, "a receive that waits")
    gone.close()
    v1.publish(worker.topic, "news")
    message = worker.one(wait_ms=30_000)
    # Whether the broker heard of it before or after the message came: it was not delivered.
    assert (message["value"], message["deliveries"]) == ("news", 1)


def test_a_member_has_at_most_as_many_in_flight_as_the_setting_says(v1: V1) -> None:
    worker = Worker(v1, *range(7))
    page = worker.ask(limit=20, member="m")
    assert (len(page["messages"]), page["limited_by"]) == (5, "member")
    page = worker.ask(limit=20, member="m")
    assert (page["messages"], page["limited_by"]) == ([], "member")
    others = worker.ask(limit=20, member="another")
    assert (len(others["messages"]), others["limited_by"]) == (2, None)
    assert {one["member"] for one in worker.leases()} == {"m", "another"}


def test_a_group_begins_at_the_start_or_where_it_says(v1: V1) -> None:
    worker = Worker(v1, "old")
    assert worker.receive(start="latest") == []
    v1.publish(worker.topic, "new")
    assert [one["value"] for one in worker.receive()] == ["new"]


def test_what_is_set_for_a_group_is_shown_changed_and_taken_back(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    nothing = {"visibility_ms": None, "inflight_max": None, "member_inflight_max": None}
    changes = {"visibility_ms": "10m", "inflight_max": 2}
    page = v1.good("PATCH", f"/groups/{group}", {"settings": changes})
    given = nothing | {"visibility_ms": 600_000, "inflight_max": 2}
    assert page == {"group": group, "settings": given}
    v1.publish(topic, "a", "b", "c")
    page = v1.good("POST", f"/groups/{group}/receive", {"topics": [topic], "limit": 3})
    assert page["visibility_ms"] == 600_000
    assert (len(page["messages"]), page["limited_by"]) == (2, "group")
    assert v1.good("GET", f"/groups/{group}")["settings"] == given
    back = v1.good("PATCH", f"/groups/{group}", {"settings": dict.fromkeys(changes)})
    assert back["settings"] == nothing
    for wrong in ({"visibility_ms": 1}, {"colour": "red"}):
        v1.refused(400, "group_setting_invalid", "PATCH", f"/groups/{group}", {"settings": wrong})


def test_leases_are_listed_in_pages(v1: V1) -> None:
    worker = Worker(v1, *range(4))
    worker.receive()
    path = f"/groups/{worker.group}/leases"
    first = v1.good("GET", path, limit=3)
    assert [one["offset"] for one in first["leases"]] == [0, 1, 2]
    assert first["next"] == f"{worker.topic}:0:2"
    rest = v1.good("GET", path, limit=3, after=first["next"])
    assert ([one["offset"] for one in rest["leases"]], rest["next"]) == ([3], None)
    assert len(worker.leases(topic=worker.topic)) == 4
    assert worker.leases(topic=v1.topic()) == []
    v1.refused(404, "topic_unknown", "GET", path, topic=fresh("topic"))
    v1.refused(404, "group_unknown", "GET", f"/groups/{fresh('group')}/leases")
    for after in ("nonsense", "orders:x:1"):
        refused = v1.refused(400, "parameter_invalid", "GET", path, after=after)
        assert refused["message"] == "after must be the `next` of the page before"


def test_lanes_are_shown_by_partition(v1: V1) -> None:
    worker = Worker(v1, "a", "b", partitions=2)
    worker.receive(limit=1)
    page = v1.good("GET", "/priority/stats", topic=worker.topic)
    assert [(one["partition"], one["lane"]) for one in page["lanes"]] == [
        (0, "normal"),
        (1, "normal"),
    ]
    assert sum(one["ready"] for one in page["lanes"]) == 1
    assert sum(one["inflight"] for one in page["lanes"]) == 1
    first = v1.good("GET", "/priority/stats", group=worker.group, limit=1)
    assert first["next"] == f"{worker.topic}:0:{worker.group}"
    rest = v1.good("GET", "/priority/stats", group=worker.group, limit=1, after=first["next"])
    assert [one["partition"] for one in rest["lanes"]] == [1]
    v1.refused(400, "parameter_invalid", "GET", "/priority/stats", after="nonsense")


def test_groups_of_the_statistics_come_in_pages(v1: V1) -> None:
    workers = sorted((Worker(v1, "a"), Worker(v1, "a")), key=lambda one: one.group)
    for worker in workers:
        worker.receive()
    page = v1.good("GET", "/reliability/stats", limit=1, after=workers[0].group)
    assert [one["group"] for one in page["groups"]] == [workers[1].group]
    (topic,) = page["groups"][0]["topics"]
    assert topic == {
        "topic": workers[1].topic,
        "leased": 1,
        "waiting": 0,
        "ready": 0,
        "is_dead_lettering": True,
    }
    assert page["totals"]["delivered"] >= 2
    first = v1.good("GET", "/reliability/stats", limit=1)
    assert first["next"] == first["groups"][0]["group"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", 0), ("limit", 21), ("bytes", 0), ("wait_ms", -1), ("wait_ms", 30_001),
        ("visibility_ms", 99), ("visibility_ms", 43_200_001), ("member", "a b"), ("topics", []),
    ],
)  # fmt: skip
def test_what_a_receive_may_not_ask_is_refused_and_named(v1: V1, name: str, value: Any) -> None:
    worker = Worker(v1, "a")
    body = {"topics": [worker.topic], name: value}
    path = f"/groups/{worker.group}/receive"
    page = v1.refused(400, "parameter_invalid", "POST", path, body)
    assert page["parameter"] == name
    assert worker.one()["deliveries"] == 1


def test_a_receive_takes_what_is_just_allowed(v1: V1) -> None:
    worker = Worker(v1, "a", "b")
    for how in ({"visibility_ms": 100}, {"visibility_ms": 43_200_000, "bytes": 1}):
        (message,) = worker.receive(limit=1, **how)
        settle(v1, "ack", message["receipt"])
    assert worker.receive(limit=20, wait_ms=0) == []


def test_bodies_that_are_wrong_are_refused(v1: V1) -> None:
    worker = Worker(v1, "a")
    receipt = worker.one()["receipt"]
    receive, ack = f"/groups/{worker.group}/receive", "/messages/ack"

    def refused(path: str, body: Any) -> None:
        v1.refused(400, "body_invalid", "POST", path, body)

    refused(receive, {})
    refused(receive, {"topics": [worker.topic], "max": 1})
    refused(receive, {"topics": [worker.topic], "start": "middle"})
    refused(ack, {})
    refused(ack, {"receipt": receipt, "receipts": [receipt]})
    refused(ack, {"receipts": []})
    refused(ack, {"receipts": ["x"] * 10_001})
    refused(ack, {"receipt": receipt, "delay_ms": 1})
    settles = [
        {"kind": "ack", "receipt": receipt, "delay_ms": 1},
        {"kind": "ack", "receipt": receipt, "error": "no"},
        {"kind": "nack", "receipt": receipt, "visibility_ms": 1000},
        {"kind": "gone", "receipt": receipt},
    ]
    for one in settles:
        refused("/messages/settle", {"settles": [one]})
    refused("/messages/settle", {"settles": []})
    v1.refused(400, "parameter_invalid", "POST", ack + "?x=1", {"receipt": receipt})
    v1.refused(
        400,
        "parameter_invalid",
        "POST",
        "/messages/nack",
        {"receipt": receipt, "delay_ms": 86_400_001},
    )
    many = {"receipts": [receipt], "visibility_ms": 99}
    v1.refused(400, "parameter_invalid", "POST", "/messages/visibility", many)
    # 10,000 are settled, each with its result.
    page = v1.good("POST", ack, {"receipts": ["x"] * 9_999 + [receipt]})
    assert (page["settled"], page["refused"], len(page["results"])) == (1, 9_999, 10_000)


def test_names_and_topics_that_are_not_there_are_refused(v1: V1) -> None:
    worker = Worker(v1, "a")
    body = {"topics": [worker.topic]}
    v1.refused(400, "group_name_invalid", "POST", "/groups/__g/receive", body)
    v1.refused(400, "group_name_invalid", "POST", "/groups/a%20b/ack", {"receipt": "x"})
    path = f"/groups/{worker.group}/receive"
    v1.refused(404, "topic_unknown", "POST", path, {"topics": ["nowhere"]})
    compact = v1.topic(compact=True)
    v1.refused(409, "leases_refused", "POST", path, {"topics": [compact]})
    v1.refused(405, "method_not_allowed", "GET", "/messages/ack")


def test_reading_and_leasing_in_one_group_take_turns(v1: V1) -> None:
    worker = Worker(v1, "a", "b")
    receipt = worker.one()["receipt"]
    join = {"topics": [worker.topic], "auto_offset_reset": "earliest"}
    path = f"/groups/{worker.group}"
    v1.refused(409, "group_uses_leases", "POST", path + "/join", join)
    settle(v1, "ack", receipt)
    joined = v1.good("POST", path + "/join", join)
    v1.refused(409, "group_uses_offsets", "POST", path + "/receive", {"topics": [worker.topic]})
    query = {"member_id": joined["member_id"], "generation": joined["generation"]}
    page = v1.good("GET", path + "/poll", **query)
    assert [one["value"] for one in page["messages"]] == ["b"]


def test_a_broker_that_stops_answers_receives_that_wait(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        worker = Worker(v1)
        found: list[Any] = []

        def receive() -> None:
            other = V1(broker)
            body = {"topics": [worker.topic], "wait_ms": 30_000}
            found.append(other.good("POST", f"/groups/{worker.group}/receive", body))
            other.close()

        thread = threading.Thread(target=receive)
        thread.start()
        wait_until(lambda: _waiting(v1) == 1, "a receive that waits")
        broker.stop()
        thread.join(60)
        assert found[0]["messages"] == []
        v1.close()


def test_leases_are_as_they_were_after_a_restart(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        worker = Worker(v1, "a", "b")
        receipt = worker.one(visibility_ms=3_600_000)["receipt"]
        v1.close()
        broker.stop(signal.SIGKILL)
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = worker.v1 = V1(broker.wait_until_ready())
        assert [one["value"] for one in worker.receive()] == ["b"]
        assert settle(v1, "ack", receipt) == {"outcome": "acked"}
        v1.close()


def _waiting(v1: V1) -> float:
    lines = v1.call("GET", "/admin/metrics").text.splitlines()
    (found,) = [line for line in lines if line.startswith("millstream_http_waiting ")]
    return float(found.split()[1])
