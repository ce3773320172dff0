"""Topics over HTTP: made, looked at, changed, purged, deleted; published to and read."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh
from millstream.log.batch import decode, encode, walk
from millstream.wire.batches import join_batches


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    directory = str(tmp_path_factory.mktemp("broker"))
    with BrokerProcess(directory, "--body-bytes-max", "2M") as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


# ---- management


def test_a_topic_is_made_described_listed_and_deleted(v1: V1) -> None:
    name = fresh("orders")
    made = v1.call("POST", "/topics", {"name": name, "partitions": 2})
    assert made.status_code == 201
    page = v1.good("GET", f"/topics/{name}")
    assert page == made.json()
    assert (page["name"], page["partitions"], len(page["details"])) == (name, 2, 2)
    assert page["details"][0] | {"bytes": 0, "segments": 0, "leader_epoch": 0} == {
        "partition": 0, "start": 0, "end": 0, "bytes": 0, "segments": 0, "leader_epoch": 0,
    }  # fmt: skip
    assert name in [one["name"] for one in v1.good("GET", "/topics")["topics"]]
    assert v1.call("DELETE", f"/topics/{name}").status_code == 204
    v1.refused(404, "topic_unknown", "GET", f"/topics/{name}")


def test_a_topic_made_again_under_an_old_name_inherits_nothing(v1: V1) -> None:
    topic = v1.topic(partitions=2, retention_ms=5000)
    first = v1.good("GET", f"/topics/{topic}")
    v1.publish(topic, 1, 2, 3)
    v1.good("DELETE", f"/topics/{topic}")
    v1.good("POST", "/topics", {"name": topic})
    second = v1.good("GET", f"/topics/{topic}")
    assert second["uuid"] != first["uuid"]
    assert second["settings"]["retention_ms"] != 5000
    assert v1.values(topic) == []


def test_lists_come_in_pages(v1: V1) -> None:
    names = sorted(v1.topic() for _ in range(3))
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = v1.good("GET", "/topics", limit=2, after=after)
        assert len(page["topics"]) <= 2
        found += [one["name"] for one in page["topics"]]
        after = page["next"]
    assert found == sorted(found)
    assert set(names) <= set(found)


def test_settings_change_and_go_back_to_their_defaults(v1: V1) -> None:
    topic = v1.topic()
    before = v1.good("GET", f"/topics/{topic}")["settings"]
    changed = v1.good(
        "PATCH", f"/topics/{topic}", {"settings": {"retention_ms": "2h", "compact": True}}
    )
    assert changed["settings"] == before | {"retention_ms": 7_200_000, "compact": True}
    back = v1.good(
        "PATCH", f"/topics/{topic}", {"settings": {"retention_ms": None, "compact": None}}
    )
    assert back["settings"] == before


def test_partitions_are_added_and_never_taken_away(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    assert v1.good("POST", f"/topics/{topic}/partitions", {"partitions": 5})["partitions"] == 5
    v1.refused(
        400, "partition_count_invalid", "POST", f"/topics/{topic}/partitions", {"partitions": 4}
    )
    assert len(v1.good("GET", f"/topics/{topic}")["details"]) == 5


def test_a_purge_removes_records_and_keeps_the_topic_and_its_offsets(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, 1, 2, 3)
    neighbour = v1.topic()
    v1.publish(neighbour, "stays")
    assert v1.call("POST", f"/topics/{topic}/purge").status_code == 204
    assert v1.values(topic) == []
    assert v1.publish(topic, 4)[0]["offset"] == 3
    assert v1.values(topic) == [4]
    assert v1.values(neighbour) == ["stays"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"name": "a b"}, 400, "topic_name_invalid"),
        ({"name": ""}, 400, "topic_name_invalid"),
        ({"name": ".."}, 400, "topic_name_invalid"),
        ({"name": "x" * 250}, 400, "topic_name_invalid"),
        ({"name": "größe"}, 400, "topic_name_invalid"),
        ({"name": "__offsets"}, 403, "topic_reserved"),
        ({"name": "fine", "partitions": 0}, 400, "partition_count_invalid"),
        ({"name": "fine", "partitions": -1}, 400, "partition_count_invalid"),
        ({"name": "fine", "partitions": 10**30}, 400, "partition_count_invalid"),
        ({"name": "fine", "partitions": 1.5}, 400, "body_invalid"),
        ({"name": "fine", "settings": {"colour": "red"}}, 400, "topic_setting_invalid"),
        ({"name": "fine", "settings": {"fsync": "maybe"}}, 400, "topic_setting_invalid"),
        ({"name": "fine", "settings": {"retention_ms": -1}}, 400, "topic_setting_invalid"),
        ({"name": "fine", "partition": 3}, 400, "body_invalid"),
        ({}, 400, "body_invalid"),
        ([], 400, "body_invalid"),
        ("name", 400, "body_invalid"),
        (None, 400, "body_invalid"),
    ],
)
def test_what_is_no_topic_is_refused_and_not_made(
    v1: V1, body: Any, status: int, code: str
) -> None:
    before = v1.good("GET", "/topics")["topics"]
    v1.refused(status, code, "POST", "/topics", body)
    assert v1.good("GET", "/topics")["topics"] == before


def test_a_topic_is_not_made_twice(v1: V1) -> None:
    topic = v1.topic()
    v1.refused(409, "topic_exists", "POST", "/topics", {"name": topic})


def test_a_whole_number_may_be_written_with_a_point(v1: V1) -> None:
    topic = fresh("pointed")
    body = b'{"name": "%b", "partitions": 2.0, "settings": {"retention_ms": 5000.0}}'
    made = v1.good("POST", "/topics", raw=body % topic.encode())
    assert (made["partitions"], made["settings"]["retention_ms"]) == (2, 5000)
    placed = v1.good("POST", f"/topics/{topic}/messages", raw=b'{"value":1,"partition":1.0}',
                     headers={"content-type": "application/json"})  # fmt: skip
    assert placed["partition"] == 1


# ---- publishing


@pytest.mark.parametrize("verb", ["messages", "publish"])
def test_both_spellings_publish_one_message(v1: V1, verb: str) -> None:
    topic = v1.topic()
    placed = v1.good("POST", f"/topics/{topic}/{verb}", {"key": "k", "value": {"a": [1, None]}})
    assert (placed["topic"], placed["partition"], placed["offset"]) == (topic, 0, 0)
    [message] = v1.good("GET", f"/topics/{topic}/messages")["messages"]
    assert message == {
        "partition": 0,
        "offset": 0,
        "timestamp_ms": placed["timestamp_ms"],
        "key": "k",
        "value": {"a": [1, None]},
        "lane": "normal",
    }


@pytest.mark.parametrize(
    "value",
    [
        "text", "", "größe \U0001f600", 'with "quotes" \\ and \n lines', 0, -1.5, 10**25, True,
        False, None, [], {}, {"nested": [{"deep": "er"}]}, "null", "{}",
    ],
)  # fmt: skip
def test_any_json_comes_back_as_it_was(v1: V1, value: Any) -> None:
    topic = v1.topic()
    v1.good("POST", f"/topics/{topic}/messages", {"value": value})
    assert v1.values(topic) == [value]
    lines = v1.call("GET", f"/topics/{topic}/messages", headers={"accept": "application/x-ndjson"})
    assert lines.text.count("\n") == 1


def test_a_pretty_printed_value_stays_one_line_of_a_stream(v1: V1) -> None:
    topic = v1.topic()
    v1.good("POST", f"/topics/{topic}/messages", raw=b'{"value": {\r\n "a":\n 1}}',
            headers={"content-type": "application/json"})  # fmt: skip
    lines = v1.call("GET", f"/topics/{topic}/messages", headers={"accept": "application/x-ndjson"})
    assert [line for line in lines.text.split("\n") if line.endswith("}")] != []
    assert lines.text.count("\n") == 1
    assert v1.values(topic) == [{"a": 1}]


def test_bytes_travel_as_base64(v1: V1) -> None:
    topic = v1.topic()
    data, key = bytes(range(256)), b"\xff\x00"
    v1.good(
        "POST",
        f"/topics/{topic}/messages",
        {
            "value": base64.b64encode(data).decode(),
            "encoding": "base64",
            "key": base64.b64encode(key).decode(),
            "key_encoding": "base64",
            "headers": {"trace": {"base64": "/w=="}, "plain": "text", "none": None},
        },
    )
    [message] = v1.good("GET", f"/topics/{topic}/messages")["messages"]
    assert base64.b64decode(message["value"]) == data
    assert base64.b64decode(message["key"]) == key
    assert message["encoding"] == message["key_encoding"] == "base64"
    assert message["headers"] == {"trace": {"base64": "/w=="}, "plain": "text", "none": None}


def test_a_raw_body_is_the_value_and_the_query_says_the_rest(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    path = f"/topics/{topic}/messages?key=%FFk&partition=2&timestamp_ms=77&header=a:b&header=c:d:e"
    placed = v1.good("POST", path, raw=b"\x00\xfe")
    assert placed == {"topic": topic, "partition": 2, "offset": 0, "timestamp_ms": 77}
    [message] = v1.good("GET", f"/topics/{topic}/messages")["messages"]
    assert base64.b64decode(message["value"]) == b"\x00\xfe"
    assert base64.b64decode(message["key"]) == b"\xffk"
    assert message["headers"] == {"a": "b", "c": "d:e"}


def test_a_query_takes_twenty_headers(v1: V1) -> None:
    topic = v1.topic()
    path = f"/topics/{topic}/messages?" + "&".join(f"header=h{n}:x" for n in range(20))
    v1.good("POST", path, raw=b"1")
    v1.refused(400, "parameter_invalid", "POST", path + "&header=h20:x", raw=b"1")
    v1.refused(400, "parameter_invalid", "POST", f"/topics/{topic}/messages?header=x", raw=b"1")
    [message] = v1.good("GET", f"/topics/{topic}/messages")["messages"]
    assert len(message["headers"]) == 20


def test_a_key_goes_where_kafka_clients_put_it(v1: V1) -> None:
    """Vectors of the Java client's murmur2 and its partitioner, for 1000 partitions."""
    topic = v1.topic(partitions=1000)
    hashes = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536}
    for key, number in hashes.items():
        placed = v1.good("POST", f"/topics/{topic}/messages", {"key": key, "value": 1})
        assert placed["partition"] == (number & 0x7FFFFFFF) % 1000


def test_acks_none_answers_before_there_is_an_offset(v1: V1) -> None:
    topic = v1.topic()
    answer = v1.call("POST", f"/topics/{topic}/messages", {"value": 1}, acks="none")
    assert (answer.status_code, answer.json()["offset"]) == (202, -1)
    wait_until(lambda: v1.values(topic) == [1], "the message")
    assert v1.call("POST", f"/topics/{topic}/messages", {"value": 2}, acks="leader").is_success
    v1.refused(
        400, "parameter_invalid", "POST", f"/topics/{topic}/messages", {"value": 3}, acks="x"
    )


def test_a_topic_is_made_by_its_first_message(v1: V1) -> None:
    topic = fresh("auto")
    v1.good("POST", f"/topics/{topic}/messages", {"value": 1})
    assert v1.good("GET", f"/topics/{topic}")["partitions"] == 3


def test_no_topic_is_made_when_the_setting_says_so(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--topic-auto-create", "off") as broker:
        v1 = V1(broker.wait_until_ready())
        v1.refused(404, "topic_unknown", "POST", "/topics/misspelt/messages", {"value": 1})
        v1.refused(
            404, "topic_unknown", "POST", "/topics/misspelt/batch", {"messages": [{"value": 1}]}
        )
        assert v1.good("GET", "/topics")["topics"] == []
        v1.close()


def test_an_idempotency_key_stores_once_whatever_the_partition(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    headers = {"idempotency-key": "order-17"}
    path = f"/topics/{topic}/messages"
    first = v1.good("POST", path, {"value": 1, "partition": 0}, headers=headers)
    again = v1.good("POST", path, {"value": 1, "partition": 2}, headers=headers)
    assert again == first | {"duplicate": True}
    many = {"messages": [{"value": 2}, {"value": 3}]}
    placed = v1.good("POST", f"/topics/{topic}/batch", many, headers={"idempotency-key": "b"})
    repeated = v1.good("POST", f"/topics/{topic}/batch", many, headers={"idempotency-key": "b"})
    assert repeated == placed | {"duplicate": True}
    assert sorted(v1.values(topic)) == [1, 2, 3]


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", "gr\u00f6\u00dfe"])
def test_a_bad_idempotency_key_is_refused(v1: V1, key: str) -> None:
    topic = v1.topic()
    for path, body in (("messages", {"value": 1}), ("batch", {"messages": [{"value": 1}]})):
        v1.refused(
            400,
            "idempotency_key_invalid",
            "POST",
            f"/topics/{topic}/{path}",
            body,
            headers={"idempotency-key": key.encode()},
        )
    assert v1.values(topic) == []


BAD_MESSAGES = [
    ({"value": 1, "partition": 3}, 404, "partition_unknown"),
    ({"value": 1, "partition": -1}, 404, "partition_unknown"),
    ({"value": 1, "partition": 2**31}, 404, "partition_unknown"),
    ({"value": 1, "timestamp_ms": -1}, 400, "timestamp_invalid"),
    ({"value": 1, "timestamp_ms": 2**63}, 400, "timestamp_invalid"),
    ({"value": 1, "headers": {"ms-lane": "high"}}, 400, "header_invalid"),
    ({"value": 1, "headers": {"": "x"}}, 400, "header_invalid"),
    ({"value": 1, "headers": {"h" * 256: "x"}}, 400, "header_invalid"),
    ({"value": 1, "headers": {f"h{n}": "" for n in range(101)}}, 400, "header_invalid"),
    ({"value": "%%%", "encoding": "base64"}, 400, "body_invalid"),
    ({"value": 7, "encoding": "base64"}, 400, "body_invalid"),
    ({"valeu": 7}, 400, "body_invalid"),
    ({"value": 7, "partition": "1"}, 400, "body_invalid"),
    ({"value": 7, "headers": {"h": 1}}, 400, "body_invalid"),
    ({"value": 1, "key": "%", "key_encoding": "base64"}, 400, "body_invalid"),
    ({"value": 1, "headers": {"h": {"base64": "%"}}}, 400, "body_invalid"),
    ({"value": "x" * 1_100_000}, 413, "message_too_large"),
]


@pytest.mark.parametrize(("bad", "status", "code"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_its_own_code_and_named_in_a_batch(
    v1: V1, bad: dict[str, Any], status: int, code: str
) -> None:
    topic = v1.topic(partitions=3)
    v1.refused(status, code, "POST", f"/topics/{topic}/messages", bad)
    batch = {"messages": [{"value": 0}, {"value": 1, "partition": 1}, bad, {"value": 2}]}
    error = v1.refused(status, code, "POST", f"/topics/{topic}/batch", batch)
    assert error["record"] == 2
    assert v1.values(topic) == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"text"', b'{"key":"k"}', b'{"value":1,"what":2}',
        b'{"value":1,"key":7}', b'{"value":1,"encoding":"gzip"}', b'{"value":"\xff"}',
        b'{"value":"\\ud800"}', b'{"value":1,"partition":"0"}', b'{"value":1,"partition":0.5}',
        b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_message_is_refused(v1: V1, body: bytes) -> None:
    topic = v1.topic()
    headers = {"content-type": "application/json"}
    v1.refused(400, "body_invalid", "POST", f"/topics/{topic}/messages", raw=body, headers=headers)
    v1.refused(
        400,
        "body_invalid",
        "POST",
        f"/topics/{topic}/batch",
        raw=b'{"messages":[%b]}' % body,
        headers=headers,
    )
    assert v1.values(topic) == []


@pytest.mark.parametrize("path", ["messages", "batch"])
@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\ud800 and more text", "\\ud800\\u0041"])
def test_half_of_a_surrogate_pair_is_called_that(v1: V1, path: str, half: str) -> None:
    for field in ("value", "key"):
        other = '"value":1,' if field == "key" else ""
        body = f'{{{other}"{field}":"{half}"}}'
        body = body if path == "messages" else f'{{"messages":[{body}]}}'
        path_of = f"/topics/{v1.topic()}/{path}"
        headers = {"content-type": "application/json"}
        page = v1.refused(400, "body_invalid", "POST", path_of, raw=body.encode(), headers=headers)
        assert "half of a surrogate pair" in page["message"]


def test_a_body_that_is_no_json_hears_how_bytes_are_published(v1: V1) -> None:
    path = f"/topics/{v1.topic()}/messages"
    form = {"content-type": "application/x-www-form-urlencoded"}
    page = v1.refused(400, "body_invalid", "POST", path, raw=b"hello", headers=form)
    assert "Content-Type: application/octet-stream" in page["message"]
    page = v1.refused(400, "body_invalid", "POST", path, raw=b'{"key":"k"}', headers=form)
    assert "octet-stream" not in page["message"]


def test_a_batch_has_a_message_and_not_too_many(v1: V1) -> None:
    topic = v1.topic()
    path = f"/topics/{topic}/batch"
    v1.refused(400, "body_invalid", "POST", path, {"messages": []})
    v1.refused(400, "body_invalid", "POST", path, {"messages": [{"value": 0}] * 10_001})
    assert v1.good("POST", path, {"messages": [{"value": 0}] * 10_000})["count"] == 10_000


def test_a_body_past_the_limit_is_refused(v1: V1) -> None:
    topic = v1.topic()
    error = v1.refused(
        413, "body_too_large", "POST", f"/topics/{topic}/batch", raw=b"x" * 2_200_000
    )
    assert error["limit_bytes"] == 2 * 1024 * 1024


@pytest.mark.parametrize("name", ["__offsets", "__topics"])
def test_internal_topics_are_neither_written_nor_read(v1: V1, name: str) -> None:
    v1.refused(403, "topic_reserved", "POST", f"/topics/{name}/messages", {"value": 1})
    v1.refused(403, "topic_reserved", "POST", f"/topics/{name}/batch", {"messages": [{"value": 1}]})
    v1.refused(403, "topic_reserved", "GET", f"/topics/{name}/messages")
    v1.refused(403, "topic_reserved", "DELETE", f"/topics/{name}")
    v1.refused(403, "topic_reserved", "POST", f"/topics/{name}/batches", raw=_batches([(0, 1)]))


@pytest.mark.parametrize("path", ["a%20b", "%C3%BC", "%FF", "a%2Fb", "x" * 250])
def test_a_bad_name_in_a_path_is_told_as_such(v1: V1, path: str) -> None:
    v1.refused(400, "topic_name_invalid", "POST", f"/topics/{path}/messages", {"value": 1})


# ---- reading


def test_reading_goes_on_where_it_ended(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    for number in range(30):
        v1.publish(topic, number, partition=number % 3)
    found: list[int] = []
    query: dict[str, Any] = {"limit": 7}
    while True:
        page = v1.good("GET", f"/topics/{topic}/messages", **query)
        if not page["messages"]:
            break
        assert len(page["messages"]) <= 7
        found += [one["value"] for one in page["messages"]]
        query["positions"] = page["next"]
    assert sorted(found) == list(range(30))
    for partition in range(3):
        mine = [value for value in found if value % 3 == partition]
        assert mine == sorted(mine)


@pytest.mark.parametrize(
    ("query", "parameter"), [("follow=true", "follow"), ("positions=0:1&partition=1", "positions")]
)
def test_what_would_not_count_in_a_reading_is_refused(v1: V1, query: str, parameter: str) -> None:
    path = f"/topics/{v1.topic(partitions=2)}/messages?{query}"
    assert v1.refused(400, "parameter_invalid", "GET", path)["parameter"] == parameter


def test_reading_begins_at_an_offset_a_time_or_an_end(v1: V1) -> None:
    topic = v1.topic()
    for number in range(5):
        v1.publish(topic, number, timestamp_ms=1000 + number)
    assert v1.values(topic, offset=3) == [3, 4]
    assert v1.values(topic, partition=0, offset="earliest", limit=2) == [0, 1]
    assert v1.values(topic, offset="latest") == []
    assert v1.values(topic, time=1002) == [2, 3, 4]
    assert v1.values(topic, time=5000) == []
    assert v1.values(topic, positions="0:4") == [4]
    offsets = v1.good("GET", f"/topics/{topic}/offsets", time=1002)["offsets"]
    assert offsets == [{"partition": 0, "start": 0, "end": 5, "offset": 2}]
    assert "offset" not in v1.good("GET", f"/topics/{topic}/offsets")["offsets"][0]


def test_at_least_one_message_comes_however_few_bytes_are_asked_for(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, "x" * 10_000, "y" * 10_000)
    assert v1.values(topic, bytes=1) == ["x" * 10_000]


def test_an_offset_past_the_end_is_out_of_range(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, 1)
    error = v1.refused(416, "offset_out_of_range", "GET", f"/topics/{topic}/messages", offset=2)
    assert (error["offset"], error["start"], error["end"]) == (2, 0, 1)


def test_a_read_waits_for_a_message(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    found: list[Any] = []

    def read() -> None:
        reader = V1(v1.broker)
        found.extend(reader.values(topic, timeout=30))
        reader.close()

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: _waiting(v1) == 1, "a read that waits")
    v1.publish(topic, "news", partition=2)
    thread.join(60)
    assert found == ["news"]
    assert _waiting(v1) == 0


@pytest.mark.parametrize("path", ["messages", "partitions/0/batches"])
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_reader_that_goes_away_leaves_nothing_behind(v1: V1, path: str, accept: str) -> None:
    topic = v1.topic()
    host, port = v1.http.base_url.host, v1.http.base_url.port
    head = f"GET /v1/topics/{topic}/{path}?timeout=30 HTTP/1.1\r\nhost: {host}\r\naccept: {accept}"
    with closing(socket.create_connection((host, port or 80), timeout=60)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n")
        wait_until(lambda: _waiting(v1) == 1, "a read that waits")
    wait_until(lambda: _waiting(v1) == 0, "the end of the wait")


def _waiting(v1: V1) -> float:
    text = v1.call("GET", "/admin/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("millstream_http_waiting ")]
    return float(line.split()[1])


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=10001", "limit=1_0", "limit=%D9%A1", "limit=+1", "limit=", "limit=1.0",
        "bytes=0", "bytes=4194305", "timeout=-1", "timeout=31", "timeout=nan", "timeout=inf",
        "timeout=1_0", "partition=-1", "partition=x", "partition=2147483648", "offset=-1",
        "offset=first", "offset=9223372036854775808", "time=-1", "time=now", "positions=0",
        "positions=0:x", "positions=", "positions=0:1,0:2", "positions=0:1,", "follow=yes",
        "limit=1&limit=2", "what=1", "offset=%FF",
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused(v1: V1, query: str) -> None:
    topic = v1.topic()
    for accept in ("application/json", "application/x-ndjson", "text/event-stream"):
        v1.refused(
            400,
            "parameter_invalid",
            "GET",
            f"/topics/{topic}/messages?{query}",
            headers={"accept": accept},
        )


def test_a_partition_that_is_not_there_is_told(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    for path in ("messages?partition=2", "offsets?partition=2", "messages?positions=7:0"):
        v1.refused(404, "partition_unknown", "GET", f"/topics/{topic}/{path}")
    v1.refused(404, "partition_unknown", "GET", f"/topics/{topic}/partitions/2/batches")
    v1.refused(400, "parameter_invalid", "GET", f"/topics/{topic}/partitions/x/batches")


# ---- ready-made batches


def _batch(count: int, first: int = 0) -> bytes:
    return encode([(1000 + n, b"k%d" % n, b"v%d" % n, ()) for n in range(first, first + count)])


def _batches(parts: list[tuple[int, int]]) -> bytes:
    return join_batches([(partition, _batch(count)) for partition, count in parts])


def test_ready_made_batches_go_in_and_come_out_as_they_are(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    one = v1.good("POST", f"/topics/{topic}/partitions/1/batches", raw=_batch(3) + _batch(2))
    assert one == {
        "topic": topic,
        "placed": [
            {"partition": 1, "offset": 0, "count": 3},
            {"partition": 1, "offset": 3, "count": 2},
        ],
    }
    many = v1.good("POST", f"/topics/{topic}/batches", raw=_batches([(0, 1), (1, 4)]))
    assert many["placed"] == [
        {"partition": 0, "offset": 0, "count": 1},
        {"partition": 1, "offset": 5, "count": 4},
    ]
    answer = v1.call("GET", f"/topics/{topic}/partitions/1/batches")
    assert (answer.headers["ms-start"], answer.headers["ms-end"]) == ("0", "9")
    data = answer.content
    records = [
        record
        for position, header in walk(data)
        for record in decode(data[position : position + header.size])
    ]
    assert [record.offset for record in records] == list(range(9))
    assert [record.value for record in records[:3]] == [b"v0", b"v1", b"v2"]
    assert v1.values(topic, partition=0) == ["v0"]
    later = v1.call("GET", f"/topics/{topic}/partitions/1/batches", offset="latest", timeout=0)
    assert (later.status_code, later.content) == (200, b"")


def test_of_bad_batches_none_is_stored(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    good = _batch(2)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    old = bytearray(good)
    old[16] = 1
    to_one = f"/topics/{topic}/partitions/0/batches"
    v1.refused(400, "batch_checksum_mismatch", "POST", to_one, raw=good + bytes(flipped))
    v1.refused(400, "batch_magic_unsupported", "POST", to_one, raw=good + bytes(old))
    v1.refused(400, "batch_length_invalid", "POST", to_one, raw=good + good[:-1])
    v1.refused(400, "body_invalid", "POST", to_one, raw=b"")
    several = f"/topics/{topic}/batches"
    for wrong, code in (
        (bytes(flipped), "batch_checksum_mismatch"),
        (good[:-1], "batch_length_invalid"),
    ):
        v1.refused(400, code, "POST", several, raw=join_batches([(0, good), (1, wrong)]))
    v1.refused(404, "partition_unknown", "POST", several, raw=join_batches([(0, good), (2, good)]))
    v1.refused(404, "partition_unknown", "POST", several, raw=join_batches([(-1, good)]))
    assert v1.values(topic) == []


def test_a_forged_mark_of_json_is_not_believed(v1: V1) -> None:
    topic = v1.topic()
    mark = (("ms-type", b"json"),)
    batch = encode(
        [(1, None, b'{"half":', mark), (1, None, b'"\xff"', mark), (1, None, b"7", mark)]
    )
    v1.good("POST", f"/topics/{topic}/partitions/0/batches", raw=batch)
    assert v1.values(topic) == ['{"half":', "Iv8i", 7]


# ---- the broker itself


def test_the_admin_pages_are_those_of_the_broker(v1: V1) -> None:
    assert v1.good("GET", "/admin/health")["status"] == "healthy"
    assert "millstream_uptime_seconds" in v1.call("GET", "/admin/metrics").text
    page = v1.good("GET", "/admin/cluster")
    assert page["cluster"]["nodes"] == len(page["nodes"]) == 1
    assert page["nodes"][0]["state"] == "ready"
    v1.refused(400, "parameter_invalid", "GET", "/admin/cluster?verbose=1")


def test_a_method_that_a_path_has_not_is_told_which_it_has(v1: V1) -> None:
    answer = v1.call("PUT", "/topics/x")
    assert answer.status_code == 405
    assert {one.strip() for one in answer.headers["allow"].split(",")} == {"DELETE", "GET", "PATCH"}
