"""Messages as lines of JSON and as server-sent events: they follow, resume and end cleanly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1
from millstream.listeners.http.read_streams import KEEP_ALIVE_S

NDJSON = {"accept": "application/x-ndjson"}
EVENTS = {"accept": "text/event-stream"}


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker"))) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


class Following:
    """A stream that is read in a thread of its own."""

    def __init__(self, v1: V1, path: str, headers: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.is_over = False
        self._http = httpx.Client(base_url=v1.broker.url("/v1"), timeout=90)
        self._thread = threading.Thread(target=self._read, args=(path, headers))
        self._thread.start()
        wait_until(lambda: self.status, "the head of the stream")

    def _read(self, path: str, headers: dict[str, str]) -> None:
        with self._http.stream("GET", path, headers=headers) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines.append(line)
        self.is_over = True

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Ids and data, in order."""
        found: list[tuple[str, dict[str, Any]]] = []
        id = ""
        for line in list(self.lines):
            if line.startswith("id: "):
                id = line[4:]
            elif line.startswith("data: "):
                found.append((id, json.loads(line[6:])))
        return found

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.messages()) + len(self.events()) >= count, f"{count} messages")

    def join(self) -> None:
        self._thread.join(60)
        assert self.is_over
        self._http.close()


def test_lines_end_where_the_topic_ended(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    for partition in range(2):
        v1.publish(topic, *range(partition, 2500, 2), partition=partition)
    answer = v1.call("GET", f"/topics/{topic}/messages", headers=NDJSON)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    values = [json.loads(line)["value"] for line in answer.text.splitlines()]
    assert sorted(values) == list(range(2500))


def test_lines_end_after_a_limit(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, *range(10))
    answer = v1.call("GET", f"/topics/{topic}/messages", headers=NDJSON, limit=3, offset=5)
    assert [json.loads(line)["value"] for line in answer.text.splitlines()] == [5, 6, 7]


def test_lines_of_an_empty_topic_are_none(v1: V1) -> None:
    answer = v1.call("GET", f"/topics/{v1.topic()}/messages", headers=NDJSON)
    assert (answer.status_code, answer.text) == (200, "")


def test_lines_follow_when_told_and_end_with_the_topic(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    v1.publish(topic, "old", partition=1)
    stream = Following(v1, f"/topics/{topic}/messages?follow=true", NDJSON)
    stream.wait_for(1)
    for partition in range(3):
        v1.publish(topic, f"new-{partition}", partition=partition)
        stream.wait_for(2 + partition)
    assert [one["value"] for one in stream.messages()] == ["old", "new-0", "new-1", "new-2"]
    v1.good("DELETE", f"/topics/{topic}")
    stream.join()
    assert stream.messages()[-1]["error"] == "topic_unknown"


def test_a_tail_begins_at_the_end(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, "old")
    stream = Following(v1, f"/topics/{topic}/messages?offset=latest&limit=2", EVENTS)
    v1.publish(topic, "new", "newer")
    stream.join()
    assert [page["value"] for _, page in stream.events()] == ["new", "newer"]


def test_events_resume_after_the_last_id(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    for number in range(9):
        v1.publish(topic, number, partition=number % 3)
    path = f"/topics/{topic}/messages?follow=false"
    first = Following(v1, path, EVENTS)
    first.join()
    events = first.events()
    assert sorted(page["value"] for _, page in events) == list(range(9))
    for at, (id, _) in enumerate(events):
        resumed = Following(v1, path, EVENTS | {"last-event-id": id})
        resumed.join()
        seen = [page["value"] for _, page in events[: at + 1]]
        rest = [page["value"] for _, page in resumed.events()]
        assert sorted(seen + rest) == list(range(9)), id


def test_events_go_on_in_partitions_that_were_added_meanwhile(v1: V1) -> None:
    topic = v1.topic(partitions=1)
    v1.publish(topic, "a")
    v1.good("POST", f"/topics/{topic}/partitions", {"partitions": 2})
    v1.publish(topic, "b", partition=1)
    resumed = Following(
        v1, f"/topics/{topic}/messages?follow=false", EVENTS | {"last-event-id": "0:1"}
    )
    resumed.join()
    assert [page["value"] for _, page in resumed.events()] == ["b"]


@pytest.mark.parametrize("headers", [NDJSON, EVENTS])
def test_a_stream_that_waits_reads_new_partitions_at_once(v1: V1, headers: dict[str, str]) -> None:
    topic = v1.topic(partitions=1)
    v1.publish(topic, "a")
    stream = Following(v1, f"/topics/{topic}/messages?follow=true&limit=2", headers)
    stream.wait_for(1)
    began_s = time.monotonic()
    v1.good("POST", f"/topics/{topic}/partitions", {"partitions": 2})
    v1.publish(topic, "b", partition=1)
    stream.join()
    assert len(stream.messages()) + len(stream.events()) == 2
    assert time.monotonic() - began_s < KEEP_ALIVE_S / 2


def test_events_resume_behind_what_is_gone_and_say_so(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    v1.publish(topic, "a", "b", "c", partition=0)
    v1.call("POST", f"/topics/{topic}/purge")
    v1.publish(topic, "d", partition=0)
    path = f"/topics/{topic}/messages?follow=false"
    for last, skipped in (
        ("0:1,1:0", [{"partition": 0, "from": 1, "to": 3}]),
        (
            "0:1,1:7",
            [{"partition": 0, "from": 1, "to": 3}, {"partition": 1, "from": 7, "to": 0}],
        ),
        ("0:3,1:0", []),
    ):
        resumed = Following(v1, path, EVENTS | {"last-event-id": last})
        resumed.join()
        assert resumed.lines.count("event: skipped") == len(skipped)
        *said, (id, message) = resumed.events()
        assert [page for _, page in said] == skipped
        assert message["value"] == "d"
        again = Following(v1, path, EVENTS | {"last-event-id": id})
        again.join()
        assert again.events() == []


def test_a_place_in_a_deleted_topic_is_the_start_of_one_that_has_its_name(v1: V1) -> None:
    topic = v1.topic(partitions=1)
    v1.publish(topic, "a", "b")
    place = v1.good("GET", f"/topics/{topic}/messages")["next"]
    uuid = v1.good("GET", f"/topics/{topic}")["uuid"]
    assert place == f"{uuid[:8]}:0:2"
    v1.publish(topic, "c")
    assert v1.values(topic, positions=place) == ["c"]
    v1.good("DELETE", f"/topics/{topic}")
    v1.good("POST", "/topics", {"name": topic, "partitions": 2})
    v1.publish(topic, "d", "e", "f", partition=0)
    v1.publish(topic, "g", partition=1)
    assert sorted(v1.values(topic, positions=place)) == ["d", "e", "f", "g"]
    assert v1.values(topic, positions=place, partition=1) == ["g"]
    assert v1.values(topic, positions="0:2") == ["f"]
    for accept in (EVENTS | {"last-event-id": place}, NDJSON):
        stream = Following(v1, f"/topics/{topic}/messages?follow=false&positions={place}", accept)
        stream.join()
        pages = stream.messages() + [page for _, page in stream.events()]
        assert sorted(page["value"] for page in pages) == ["d", "e", "f", "g"]


def test_events_of_many_partitions_name_them_once_a_helping(v1: V1) -> None:
    topic = v1.topic(partitions=40)
    v1.publish(topic, *range(20))
    stream = Following(v1, f"/topics/{topic}/messages?follow=false", EVENTS)
    stream.join()
    ids = [line for line in stream.lines if line.startswith("id: ")]
    assert 1 <= len(ids) < 20
    assert len(stream.events()) == 20
    last = Following(
        v1, f"/topics/{topic}/messages?follow=false", EVENTS | {"last-event-id": ids[-1][4:]}
    )
    last.join()
    assert last.events() == []


@pytest.mark.parametrize("headers", [NDJSON, EVENTS])
def test_what_cannot_be_streamed_is_refused_with_its_status(
    v1: V1, headers: dict[str, str]
) -> None:
    topic = v1.topic()
    v1.refused(404, "topic_unknown", "GET", "/topics/nowhere/messages", headers=headers)
    v1.refused(
        404, "partition_unknown", "GET", f"/topics/{topic}/messages?partition=1", headers=headers
    )
    v1.refused(
        400,
        "parameter_invalid",
        "GET",
        f"/topics/{topic}/messages",
        headers=EVENTS | {"last-event-id": "what"},
    )


@pytest.mark.parametrize("headers", [NDJSON, EVENTS])
@pytest.mark.parametrize("query", ["offset=7", "offset=7&follow=true", "positions=0:7", "offset=0"])
def test_a_stream_does_not_begin_where_there_is_nothing(
    v1: V1, query: str, headers: dict[str, str]
) -> None:
    topic = v1.topic()
    v1.call("POST", f"/topics/{topic}/messages", {"value": 1})
    v1.call("POST", f"/topics/{topic}/purge")
    path = f"/topics/{topic}/messages?{query}"
    error = v1.refused(416, "offset_out_of_range", "GET", path, headers=headers)
    assert (error["start"], error["end"]) == (1, 1)


def test_a_stop_ends_waits_and_streams_without_an_error(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        v1.publish(topic, 1)
        streams = [
            Following(v1, f"/topics/{topic}/messages?follow=true", NDJSON),
            Following(v1, f"/topics/{topic}/messages", EVENTS),
        ]
        for stream in streams:
            stream.wait_for(1)
        polls: list[httpx.Response] = []

        def poll(path: str) -> None:
            waiting = V1(broker)
            polls.append(waiting.call("GET", path + "&timeout=30"))
            waiting.close()

        paths = [
            f"/topics/{topic}/messages?offset=latest",
            f"/topics/{topic}/partitions/0/batches?offset=latest",
        ]
        threads = [threading.Thread(target=poll, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        wait_until(
            lambda: "millstream_http_waiting 4.0" in v1.call("GET", "/admin/metrics").text,
            "two streams and two polls that wait",
        )
        v1.close()
        assert broker.stop() == 0
        for thread in threads:
            thread.join(60)
        for stream in streams:
            stream.join()
        assert [answer.status_code for answer in polls] == [200, 200]
        assert not broker.messages("requests cut off")
        assert not [one for one in broker.messages() if one["level"] == "error"]
