"""Staged writes over HTTP, the files of a topic, and where the broker is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh
from millstream.log import batch as batches
from millstream.wire.staged import BODY_BYTES_MAX, NO_PART, StagedEntry, join_entries


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    flags = ("--kafka", "127.0.0.1:0", "--commit-parts-max", "3", "--staged-bytes-max", "20M")
    with BrokerProcess(str(tmp_path_factory.mktemp("broker")), *flags) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


def entry(topic: str, *values: str, partition: int = 0, due_ms: int = 0, **how: Any) -> StagedEntry:
    fields = [(1, None, value.encode(), ()) for value in values]
    return StagedEntry(topic, partition, due_ms, batches.encode(fields, **how))


def parts_of(writer: str, batch: int = 0) -> str:
    return f"/writers/{writer}/batches/{batch}/parts"


def stage(v1: V1, writer: str, *entries: StagedEntry, batch: int = 0, **query: Any) -> str:
    staged = v1.good("POST", parts_of(writer, batch), raw=join_entries(entries), **query)
    assert staged["bytes"] == sum(len(one.batch) for one in entries)
    return str(staged["part"])


def commit(v1: V1, writer: str, parts: list[str], batch: int = 0, **more: Any) -> dict[str, Any]:
    path = f"/writers/{writer}/batches/{batch}/commit"
    return dict(v1.good("POST", path, {"parts": parts} | more))


# ---- staging and committing


def test_what_tasks_stage_appears_with_the_commit(v1: V1) -> None:
    topic, writer = v1.topic(partitions=2), fresh("writer")
    parts = [
        stage(v1, writer, entry(topic, "a", "b"), task=0, attempt=11),
        stage(v1, writer, entry(topic, "c", partition=1), task=1, attempt=12),
    ]
    stage(v1, writer, entry(topic, "lost"), task=1, attempt=13)
    assert v1.values(topic) == []
    expected = {"writer": writer, "batch": 0, "state": "committed", "records": 3, "skipped": {}}
    assert commit(v1, writer, parts) == expected | {"already": False}
    assert sorted(v1.values(topic)) == ["a", "b", "c"]
    assert commit(v1, writer, []) == expected | {"already": True}
    assert sorted(v1.values(topic)) == ["a", "b", "c"]


def test_a_batch_that_is_committed_needs_no_parts(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    commit(v1, writer, [stage(v1, writer, entry(topic, "a"))])
    assert stage(v1, writer, entry(topic, "a")) == NO_PART
    assert commit(v1, writer, [NO_PART])["already"] is True
    commit(v1, writer, [], batch=1)
    assert commit(v1, writer, [NO_PART])["records"] is None
    assert v1.values(topic) == ["a"]


def test_a_batch_of_another_owner_is_not_taken_for_the_same(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    part = stage(v1, writer, entry(topic, "a"), owner="one")
    assert commit(v1, writer, [part], owner="one")["already"] is False
    assert stage(v1, writer, entry(topic, "a"), owner="one") == NO_PART
    body = join_entries([entry(topic, "b")])
    v1.refused(409, "writer_ahead", "POST", parts_of(writer), raw=body, owner="other")
    path = f"/writers/{writer}/batches/0/commit"
    v1.refused(409, "writer_ahead", "POST", path, {"parts": [], "owner": "other"})
    v1.refused(400, "parameter_invalid", "POST", parts_of(writer), raw=body, owner="a b")
    v1.refused(400, "parameter_invalid", "POST", path, {"parts": [], "owner": "a b"})
    assert v1.good("GET", f"/writers/{writer}")["last"]["owner"] == "one"
    assert v1.values(topic) == ["a"]


def test_a_writer_may_say_that_a_batch_is_its_final_one(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    part = stage(v1, writer, entry(topic, "a"))
    assert commit(v1, writer, [part], forget=False)["already"] is False
    assert v1.good("GET", f"/writers/{writer}")["last"]["final"] is False
    assert commit(v1, writer, [part], forget=True)["already"] is True
    assert v1.good("GET", f"/writers/{writer}")["last"]["final"] is True


def test_records_may_be_for_later(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    due_ms = int(time.time() * 1000) + 300
    part = stage(v1, writer, entry(topic, "later", partition=-1, due_ms=due_ms))
    assert commit(v1, writer, [part])["records"] == 1
    wait_until(lambda: v1.values(topic) == ["later"], "the schedule")
    assert time.time() * 1000 >= due_ms


def test_a_body_of_many_megabytes_is_staged_and_copied(v1: V1) -> None:
    topic, writer = v1.topic(partitions=2), fresh("writer")
    ones = [entry(topic, *(f"{n} {m}" + "x" * 980 for m in range(900)), partition=n % 2)
            for n in range(8)]  # fmt: skip
    body = join_entries(ones)
    assert 7_000_000 < len(body) <= BODY_BYTES_MAX
    part = v1.good("POST", parts_of(writer), raw=body)
    assert part["records"] == 7200
    assert commit(v1, writer, [part["part"]])["records"] == 7200
    ends = v1.good("GET", f"/topics/{topic}/offsets")["offsets"]
    assert sum(one["end"] for one in ends) == 7200


def test_one_batch_may_be_larger_than_several(v1: V1) -> None:
    topic, writer = v1.topic(message_bytes_max=12_000_000), fresh("writer")
    large = entry(topic, "x" * 10_000_000)
    part = stage(v1, writer, large)
    body = join_entries([large, entry(topic, "a")])
    v1.refused(413, "body_too_large", "POST", parts_of(writer), raw=body)
    assert commit(v1, writer, [part])["records"] == 1
    assert len(v1.values(topic)[0]) == 10_000_000


def test_who_does_not_wait_is_told_how_far_it_is(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    part = stage(v1, writer, *(entry(topic, *["x" * 500] * 100) for _ in range(100)))
    answer = v1.call("POST", f"/writers/{writer}/batches/0/commit", {"parts": [part], "wait": "0s"})
    page = answer.json()
    if answer.status_code == 202:
        assert (page["state"], page["batch"], page["trouble"]) == ("committing", 0, None)
        assert 0 <= page["done"] <= page["of"]
    assert commit(v1, writer, [part], wait="30s")["records"] == 10_000


def test_a_writer_is_shown_listed_aborted_and_forgotten(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    commit(v1, writer, [stage(v1, writer, entry(topic, "a"), batch=4)], batch=4)
    stage(v1, writer, entry(topic, "b"), batch=5)
    page = v1.good("GET", f"/writers/{writer}")
    last = page.pop("last")
    assert (last["batch"], last["records"], last["skipped"]) == (4, 1, {})
    assert abs(last["committed_ms"] - time.time() * 1000) < 60_000
    size = len(entry(topic, "b").batch)
    assert page == {
        "writer": writer, "committing": None, "staged_parts": 1, "staged_bytes": size,
    }  # fmt: skip
    assert writer in [one["writer"] for one in v1.good("GET", "/writers")["writers"]]
    aborted = v1.good("POST", f"/writers/{writer}/batches/5/abort")
    assert aborted == {"writer": writer, "batch": 5, "state": "aborted", "parts": 1}
    assert v1.good("GET", f"/writers/{writer}")["staged_parts"] == 0
    v1.refused(409, "batch_committed", "POST", f"/writers/{writer}/batches/4/abort")
    v1.good("DELETE", f"/writers/{writer}")
    v1.refused(404, "writer_unknown", "GET", f"/writers/{writer}")
    v1.refused(404, "writer_unknown", "DELETE", f"/writers/{writer}")


def test_writers_are_listed_page_by_page(v1: V1) -> None:
    names = sorted(fresh("paged") for _ in range(5))
    for name in names:
        commit(v1, name, [])
    found: list[str] = []
    after: str | None = "paged"
    while after is not None and len(found) < 50:
        page = v1.good("GET", "/writers", after=after, limit=2)
        found += [one["writer"] for one in page["writers"]]
        after = page["next"]
    assert [one for one in found if one in names] == names


# ---- errors


@pytest.mark.parametrize(
    ("status", "code", "more"),
    [
        (404, "partition_unknown", {"partition": 7}),
        (404, "partition_unknown", {"partition": -1}),
        (400, "delay_invalid", {"due_ms": 10**15}),
        (400, "batch_invalid", {"control": True}),
        (400, "batch_invalid", {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}),
    ],
)
def test_a_bad_entry_is_named(v1: V1, status: int, code: str, more: dict[str, Any]) -> None:
    topic, writer = v1.topic(), fresh("writer")
    body = join_entries([entry(topic, "good"), entry(topic, "bad", **more)])
    assert v1.refused(status, code, "POST", parts_of(writer), raw=body)["entry"] == 1
    v1.refused(404, "writer_unknown", "GET", f"/writers/{writer}")


def test_a_body_that_is_none_is_refused(v1: V1) -> None:
    writer, body = fresh("writer"), join_entries([entry(v1.topic(), "a")])
    path = parts_of(writer)
    v1.refused(400, "body_invalid", "POST", path, raw=b"")
    v1.refused(400, "body_invalid", "POST", path, raw=body[:10])
    v1.refused(400, "batch_length_invalid", "POST", path, raw=body[:-1])
    bad = body[:-1] + bytes((body[-1] ^ 1,))
    v1.refused(400, "batch_checksum_mismatch", "POST", path, raw=bad)
    several = (BODY_BYTES_MAX // len(body) + 1) * body
    v1.refused(413, "body_too_large", "POST", path, raw=several)
    v1.refused(413, "body_too_large", "POST", path, raw=bytes(BODY_BYTES_MAX + 1))
    v1.refused(403, "topic_reserved", "POST", path, raw=join_entries([entry("__staged", "a")]))


def test_what_is_asked_is_read_strictly(v1: V1) -> None:
    writer, body = fresh("writer"), join_entries([entry(v1.topic(), "a")])
    bad = "parameter_invalid"
    v1.refused(400, bad, "POST", parts_of(writer), raw=body, task=-1)
    v1.refused(400, bad, "POST", parts_of(writer), raw=body, attempt="x")
    v1.refused(400, bad, "POST", parts_of(writer), raw=body, other=1)
    v1.refused(400, bad, "POST", f"/writers/{writer}/batches/-1/parts", raw=body)
    v1.refused(400, bad, "POST", f"/writers/{writer}/batches/{2**63}/parts", raw=body)
    v1.refused(400, "writer_name_invalid", "POST", parts_of("a%20b"), raw=body)
    path = f"/writers/{writer}/batches/0/commit"
    for wrong in ({}, {"parts": "a"}, {"parts": [1]}, {"parts": [], "more": 1}):
        v1.refused(400, "body_invalid", "POST", path, wrong)
    for wait in ("soon", "31s", -1, "1h"):
        v1.refused(400, "body_invalid", "POST", path, {"parts": [], "wait": wait})
    v1.refused(400, bad, "POST", path, {"parts": []}, other=1)
    v1.refused(400, "writer_name_invalid", "POST", "/writers/%C3%BC/batches/0/abort")
    v1.refused(400, "writer_name_invalid", "GET", "/writers/a%20b")
    assert commit(v1, writer, [], wait=100)["records"] == 0


def test_a_commit_names_what_is_there(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    part = stage(v1, writer, entry(topic, "a"))
    path = f"/writers/{writer}/batches/0/commit"
    v1.refused(404, "staged_part_unknown", "POST", path, {"parts": [part, "f" * 24]})
    other = f"/writers/{writer}/batches/1/commit"
    v1.refused(404, "staged_part_unknown", "POST", other, {"parts": [part]})
    v1.refused(400, "parameter_invalid", "POST", path, {"parts": [part, part]})
    v1.refused(400, "body_invalid", "POST", path, {"parts": ["a", "b", "c", "d"]})
    v1.good("DELETE", f"/topics/{topic}")
    assert v1.refused(409, "staged_topic_gone", "POST", path, {"parts": [part]})["topic"] == topic


def test_no_more_is_staged_than_there_is_room_for(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")
    body = join_entries([entry(topic, *["x" * 1000] * 900) for _ in range(8)])
    for _ in range(2):
        v1.good("POST", parts_of(writer), raw=body)
    refused = v1.refused(429, "staged_full", "POST", parts_of(writer), raw=body)
    assert refused["limit_bytes"] == 20 * 1024 * 1024
    v1.good("DELETE", f"/writers/{writer}")
    v1.good("POST", parts_of(writer), raw=body)
    v1.good("DELETE", f"/writers/{writer}")


def test_numbers_of_staged_writes_are_on_the_metrics_page(v1: V1) -> None:
    topic, writer = v1.topic(), fresh("writer")

    def numbers() -> dict[str, float]:
        lines = v1.broker.get("/metrics").text.splitlines()
        pairs = [one.rsplit(" ", 1) for one in lines if one.startswith("millstream_staged_")]
        return {name: float(number) for name, number in pairs}

    before = numbers()
    part = stage(v1, writer, entry(topic, "a", "b"))
    stage(v1, writer, entry(topic, "c"))
    middle = numbers()
    commit(v1, writer, [part])
    after = numbers()

    def more(name: str, then: dict[str, float], now: dict[str, float]) -> float:
        return now[f"millstream_staged_{name}"] - then[f"millstream_staged_{name}"]

    assert more("parts", before, middle) == 2
    assert more("records_added_total", before, middle) == 3
    assert more("records_committed_total", middle, after) == 2
    assert more("parts_dropped_total", middle, after) == 1
    assert more("commits_total", middle, after) == 1
    assert after["millstream_staged_bytes"] == before["millstream_staged_bytes"]


# ---- the files of a topic, and where the broker is


def test_a_manifest_says_where_the_bytes_are(v1: V1) -> None:
    topic = v1.topic(partitions=2, segment_bytes=65536)
    for n in range(10):
        v1.publish(topic, *[f"{n} " + "x" * 2000] * 10, partition=0)
    page = v1.good("GET", f"/topics/{topic}/manifest")
    assert page["topic"] == topic
    assert page["uuid"] == v1.good("GET", f"/topics/{topic}")["uuid"]
    assert [one["partition"] for one in page["partitions"]] == [0, 1]
    first, second = page["partitions"]
    assert (first["start_offset"], first["high_watermark"]) == (0, 100)
    assert second["high_watermark"] == 0
    assert len(first["segments"]) > 2
    assert not first["segments"][-1]["sealed"]
    values = []
    for segment in first["segments"]:
        path = Path(page["directory"]) / "0" / segment["file"]
        data = path.read_bytes()[: segment["bytes"]]
        walked = batches.walk(data)
        assert walked[0][1].base_offset == segment["base_offset"]
        assert sum(header.size for _, header in walked) == segment["bytes"]
        for at, header in walked:
            values += [one.offset for one in batches.decode(data[at : at + header.size])]
    assert values == list(range(100))


def test_a_manifest_may_be_of_some_partitions(v1: V1) -> None:
    topic = v1.topic(partitions=40)
    path = f"/topics/{topic}/manifest"
    page = v1.good("GET", path, partition=[3, 1, 3])
    assert [one["partition"] for one in page["partitions"]] == [1, 3]
    assert len(v1.good("GET", path)["partitions"]) == 40
    v1.refused(404, "partition_unknown", "GET", path, partition=40)
    v1.refused(400, "parameter_invalid", "GET", path, partition="x")
    v1.refused(404, "topic_unknown", "GET", "/topics/no-such-topic/manifest")
    v1.refused(403, "topic_reserved", "GET", "/topics/__staged/manifest")


def test_the_cluster_page_says_where_everything_is(v1: V1) -> None:
    page = v1.good("GET", "/admin/cluster")
    [node] = page["nodes"]
    assert node["http"] == v1.broker.url("")
    assert node["kafka"] == v1.broker.kafka
    assert node["data_directory"] == v1.broker.data
    assert node["id"] == page["cluster"]["id"]
    topic = v1.topic()
    assert v1.good("GET", f"/topics/{topic}/manifest")["cluster_id"] == node["id"]
    other = v1.http.get("/admin/cluster", headers={"host": "localhost:9"}).json()
    assert other == page | {"nodes": other["nodes"], "cluster": other["cluster"]}


def test_who_listens_everywhere_is_where_the_client_came_to(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--http", "0.0.0.0:0") as broker:
        client = V1(broker.wait_until_ready())
        try:
            [node] = client.good("GET", "/admin/cluster")["nodes"]
            port = client.http.base_url.port
            assert node["http"] == f"http://{client.http.base_url.host}:{port}"
            assert node["kafka"] is None
            client.topic()
            one = client.http.get("/admin/cluster", headers={"host": f"localhost:{port}"}).json()
            assert one["nodes"][0]["http"] == f"http://localhost:{port}"
        finally:
            client.close()
