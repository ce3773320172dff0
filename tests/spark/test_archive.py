"""The pipelines `archive` and `restore`, and topics joined with their archive."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from broker_process import BrokerProcess
from millstream.errors import ArchiveInvalid, SettingInvalid
from millstream.log.batch import encode
from millstream.spark.pipelines import archive, restore
from millstream.spark.pipelines.archived import read_with_archive
from millstream.spark.pipelines.lake import Entry, Lake, OffsetRange
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from millstream.spark.pipelines.state import Status
from spark.producing import kafka_of, produce
from spark.records import client_of, publish, read_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Two days, in milliseconds.
MONDAY, TUESDAY = 1_763_942_400_000, 1_764_028_800_000


def numbered(first: int, end: int, day: int = MONDAY) -> list[dict[str, object]]:
    return [
        {
            "key": f"k{number % 7}",
            "value": {"n": number},
            "headers": {"who": "ada"},
            "lane": "high" if number % 2 else "normal",
            "timestamp_ms": day + number,
        }
        for number in range(first, end)
    ]


@dataclass
class Scene:
    spark: SparkSession
    broker: BrokerProcess
    folder: Path

    @property
    def lake(self) -> Lake:
        return Lake.at(str(self.folder / "lake"))

    def archive(self, topics: str, name: str = "archive", **options: str) -> Status:
        given = {"topics": topics, "to": self.lake.url} | options
        return run_pipeline(archive.PIPELINE, given, self.settings(name), session=self.spark)

    def restore(self, name: str = "restore", **options: str) -> Status:
        given = {"from": self.lake.url} | options
        return run_pipeline(restore.PIPELINE, given, self.settings(name), session=self.spark)

    def settings(self, name: str) -> RunSettings:
        return RunSettings(server=self.broker.url(""), folder=self.folder / "runs", name=name)

    def archived_numbers(self) -> list[int]:
        """What any reader of Parquet finds."""
        frame = self.spark.read.parquet(self.lake.url)
        return sorted(json.loads(row.value)["n"] for row in frame.select("value").collect())

    def with_archive(self, topic: str) -> list[int]:
        server = self.broker.url("")
        frame = read_with_archive(self.spark, topic, self.lake.url, server=server)
        return sorted(json.loads(row.value)["n"] for row in frame.collect())


@pytest.fixture
def scene(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Scene:
    return Scene(spark, broker, tmp_path)


def test_topics_become_files_by_topic_and_date(scene: Scene) -> None:
    publish(scene.broker, "ar-a", numbered(0, 50))
    publish(scene.broker, "ar-a", numbered(50, 60, TUESDAY))
    publish(scene.broker, "ar-b", numbered(60, 70))
    first = scene.archive("ar-a,ar-b")
    assert first.records == 70
    assert first.results == [f"70 records in 3 new files of {scene.lake.url}"]
    folders = sorted(
        str(path.parent.relative_to(scene.lake.url))
        for path in Path(scene.lake.url).glob("topic=*/*/*.parquet")
    )
    assert folders == [
        "topic=ar-a/date=2025-11-24",
        "topic=ar-a/date=2025-11-25",
        "topic=ar-b/date=2025-11-24",
    ]
    assert scene.archived_numbers() == list(range(70))
    publish(scene.broker, "ar-a", numbered(70, 80))
    assert scene.archive("ar-a,ar-b").records == 10
    assert scene.archived_numbers() == list(range(80))
    ends = {(topic, partition): end for (topic, _, partition), end in scene.lake.ends().items()}
    with client_of(scene.broker) as client:
        assert ends == {
            (topic, one.partition): one.end
            for topic in ("ar-a", "ar-b")
            for one in client.topics.offsets(topic)
            if one.end
        }


def test_a_day_that_fills_several_files_is_archived_whole(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "FILE_RECORDS_MAX", 10)
    publish(scene.broker, "ar-full", numbered(0, 35))
    assert scene.archive("ar-full").results == [f"35 records in 4 new files of {scene.lake.url}"]
    assert scene.archived_numbers() == scene.with_archive("ar-full") == list(range(35))
    names = [path.name for path in Path(scene.lake.url).glob("topic=*/*/*.parquet")]
    id = scene.lake.entries()[0].id
    assert sorted(names) == [f"{id}-00000-{number:03}.parquet" for number in range(4)]


def test_records_whose_time_cannot_be_told_are_archived_and_restored(scene: Scene) -> None:
    publish(scene.broker, "ar-timeless", [], partitions=1)
    # Later than a timestamp of Spark can be: to Spark they have none, and so has their partition.
    values = [json.dumps({"n": number}).encode() for number in range(5)]
    with kafka_of(scene.broker.kafka) as kafka:
        produce(kafka, ("ar-timeless", 0), encode([(2**62, None, one, []) for one in values]))
    assert scene.archive("ar-timeless").records == 5
    assert scene.archived_numbers() == scene.with_archive("ar-timeless") == list(range(5))
    scene.restore(topic="ar-timeless", to="ar-timely")
    assert sorted(one.json()["n"] for one in read_all(scene.broker, "ar-timely")) == list(range(5))
    none = scene.restore("some", topic="ar-timeless", to="ar-none", since="2025-11-25")
    assert (none.state, none.records) == ("finished", 0)


def test_a_lost_checkpoint_archives_nothing_twice(scene: Scene) -> None:
    publish(scene.broker, "ar-lost", numbered(0, 20))
    scene.archive("ar-lost")
    shutil.rmtree(scene.folder / "runs")
    publish(scene.broker, "ar-lost", numbered(20, 30))
    assert scene.archive("ar-lost").records == 10
    assert scene.archived_numbers() == list(range(30))


def test_what_retention_took_first_is_an_error(scene: Scene) -> None:
    publish(scene.broker, "ar-gap", numbered(0, 20), partitions=1)
    scene.archive("ar-gap")
    publish(scene.broker, "ar-gap", numbered(20, 30))
    with client_of(scene.broker) as client:
        client.topics.purge("ar-gap")
    publish(scene.broker, "ar-gap", numbered(30, 40))
    with pytest.raises(ArchiveInvalid, match=r"begins at offset 30, and .* ends at 20"):
        scene.archive("ar-gap", "again")
    with pytest.raises(ArchiveInvalid, match="records between are in neither"):
        scene.with_archive("ar-gap")
    scene.archive("ar-gap", "again", **{"skip-lost": "true"})
    assert scene.archived_numbers() == [*range(20), *range(30, 40)]


def test_a_topic_is_read_with_its_archive_each_record_once(scene: Scene) -> None:
    publish(scene.broker, "ar-join", numbered(0, 30))
    assert scene.with_archive("ar-join") == list(range(30))
    scene.archive("ar-join")
    publish(scene.broker, "ar-join", numbered(30, 40))
    assert scene.with_archive("ar-join") == list(range(40))
    with client_of(scene.broker) as client:
        client.topics.purge("ar-join")
    # The lake ends where the log began to be lost: what came after it is gone.
    with pytest.raises(ArchiveInvalid):
        scene.with_archive("ar-join")


def test_the_source_reads_a_topic_with_its_archive(scene: Scene) -> None:
    publish(scene.broker, "ar-source", numbered(0, 30), partitions=3)
    scene.archive("ar-source")
    with client_of(scene.broker) as client:
        client.topics.purge("ar-source")
    publish(scene.broker, "ar-source", numbered(30, 40))
    reader = scene.spark.read.format("millstream").options(
        server=scene.broker.url(""),
        subscribe="ar-source",
        includeArchive=scene.lake.url,
        includeHeaders="true",
        includeLane="true",
        valueFormat="json",
        valueSchema="n BIGINT",
    )
    rows = reader.load().collect()
    assert sorted(row.value.n for row in rows) == list(range(40))
    assert {(row.topic, row.lane) for row in rows} == {
        ("ar-source", "high"),
        ("ar-source", "normal"),
    }
    assert all("who" in [one.key for one in row.headers] for row in rows)
    places = [(row.partition, row.offset) for row in rows]
    assert len(set(places)) == 40
    old = reader.load().where("offset < 5 AND partition = 1").collect()
    assert {(row.partition, row.offset) for row in old} == {
        (partition, offset) for partition, offset in places if partition == 1 and offset < 5
    }
    assert reader.load().where(f"timestamp < timestamp_millis({MONDAY + 7})").count() == 7
    scene.archive("ar-source")
    assert sorted(row.value.n for row in reader.load().collect()) == list(range(40))
    for options, said in (
        ({"startingOffsets": "latest"}, "startingOffsets"),
        ({"startingTimestamp": "5"}, "does not begin with the earliest"),
    ):
        with pytest.raises(PySparkException, match=said):
            reader.options(**options).load().collect()


def test_what_is_archived_outlives_the_log(scene: Scene) -> None:
    publish(scene.broker, "ar-old", numbered(0, 30))
    scene.archive("ar-old")
    with client_of(scene.broker) as client:
        client.topics.purge("ar-old")
    publish(scene.broker, "ar-old", numbered(30, 35))
    assert scene.with_archive("ar-old") == list(range(35))


def test_a_topic_made_anew_does_not_have_the_archive_of_the_old_one(scene: Scene) -> None:
    publish(scene.broker, "ar-new", numbered(0, 10))
    scene.archive("ar-new")
    with client_of(scene.broker) as client:
        client.topics.delete("ar-new")
    publish(scene.broker, "ar-new", numbered(10, 15))
    assert scene.with_archive("ar-new") == list(range(10, 15))
    assert scene.archive("ar-new", "second").records == 5
    with pytest.raises(SettingInvalid, match="--uuid is needed"):
        scene.restore(topic="ar-new", to="ar-new-again")


def test_a_stream_begins_with_the_archive_and_goes_on_with_the_log(scene: Scene) -> None:
    publish(scene.broker, "ar-live", numbered(0, 20))
    scene.archive("ar-live")
    publish(scene.broker, "ar-live", numbered(20, 25))
    frame = read_with_archive(
        scene.spark, "ar-live", scene.lake.url, server=scene.broker.url(""), is_stream=True
    )
    out = str(scene.folder / "out")
    writer = frame.writeStream.format("parquet").option("path", out).trigger(availableNow=True)
    writer.option("checkpointLocation", str(scene.folder / "c")).start().awaitTermination()
    numbers = [json.loads(row.value)["n"] for row in scene.spark.read.parquet(out).collect()]
    assert sorted(numbers) == list(range(25))


# ---- restoring


def test_an_archive_comes_back_as_it_was(scene: Scene) -> None:
    publish(scene.broker, "ar-back", numbered(0, 30), partitions=3)
    scene.archive("ar-back")
    with client_of(scene.broker) as client:
        client.topics.create("ar-again", partitions=3)
    first = scene.restore(topic="ar-back", to="ar-again", **{"keep-partitions": "true"})
    assert (first.state, first.records) == ("finished", 30)

    def plain(topic: str) -> list[tuple[object, ...]]:
        return [
            (one.partition, one.key, one.value, one.headers, one.lane, one.timestamp_ms)
            for one in read_all(scene.broker, topic)
        ]

    assert Counter(plain("ar-again")) == Counter(plain("ar-back"))
    for partition in range(3):
        mine = [one for one in plain("ar-again") if one[0] == partition]
        assert mine == [one for one in plain("ar-back") if one[0] == partition]
    again = scene.restore(topic="ar-back", to="ar-again", **{"keep-partitions": "true"})
    assert again.records == 0
    assert "restored already" in again.results[0]
    assert len(read_all(scene.broker, "ar-again")) == 30


def test_a_part_of_an_archive_is_chosen_by_time(scene: Scene) -> None:
    publish(scene.broker, "ar-days", numbered(0, 10))
    publish(scene.broker, "ar-days", numbered(10, 20, TUESDAY))
    scene.archive("ar-days")
    assert scene.restore(topic="ar-days", to="ar-tuesday", since="2025-11-25").records == 10
    numbers = [one.json()["n"] for one in read_all(scene.broker, "ar-tuesday")]
    assert sorted(numbers) == list(range(10, 20))
    scene.restore("until", topic="ar-days", to="ar-monday", until="2025-11-25T00:00+00:00")
    assert len(read_all(scene.broker, "ar-monday")) == 10
    noon = {"since": "2025-11-24T12:00", "until": "2025-11-24T13:00"}
    none = scene.restore("noon", topic="ar-days", to="ar-noon", **noon)
    assert (none.state, none.records) == ("finished", 0)


def test_a_restore_ends_and_does_not_go_on(scene: Scene) -> None:
    given = {"from": scene.lake.url, "topic": "ar-ends", "to": "ar-ended"}
    settings = replace(scene.settings("ends"), is_continuous=True)
    with pytest.raises(SettingInvalid, match="leave out --continuous"):
        run_pipeline(restore.PIPELINE, given, settings, session=scene.spark)


def test_a_restore_that_broke_off_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (0, 10, 20):
        publish(scene.broker, "ar-broken", numbered(first, first + 10))
        scene.archive("ar-broken")
    written: list[int] = []
    write: Callable[..., int] = restore._write

    def breaking(context: object, frame: object, name: str, number: int) -> int:
        records = write(context, frame, name, number)
        written.append(number)
        if written == [0, 1]:
            raise OSError("pulled")
        return records

    monkeypatch.setattr(restore, "_write", breaking)
    given = {"topic": "ar-broken", "to": "ar-mended", "from": scene.lake.url}
    settings = scene.settings("broken")
    settings.records_max = 10
    with pytest.raises(OSError, match="pulled"):
        run_pipeline(restore.PIPELINE, given, settings, session=scene.spark)
    with pytest.raises(SettingInvalid, match="another --name"):
        run_pipeline(restore.PIPELINE, given | {"to": "other"}, settings, session=scene.spark)
    done = run_pipeline(restore.PIPELINE, given, settings, session=scene.spark)
    assert (written, done.records) == ([0, 1, 2], 10)
    numbers = [one.json()["n"] for one in read_all(scene.broker, "ar-mended")]
    assert sorted(numbers) == list(range(30))


def test_a_plan_that_was_being_written_in_a_crash_is_made_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(scene.broker, "ar-plan", numbered(0, 10))
    scene.archive("ar-plan")
    write = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        if "plan" not in path.name:
            return write(path, data)
        write(path, data[: len(data) // 2])
        raise OSError("pulled")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_bytes", half)
        with pytest.raises(OSError, match="pulled"):
            scene.restore(topic="ar-plan", to="ar-planned")
    assert scene.restore(topic="ar-plan", to="ar-planned").records == 10


def test_what_cannot_be_restored_is_said(scene: Scene) -> None:
    with pytest.raises(ArchiveInvalid, match="has nothing of gone; it has no topic"):
        scene.restore(topic="gone", to="x")
    with pytest.raises(SettingInvalid, match="--since is 'today'"):
        scene.restore(topic="gone", to="x", since="today")


# ---- the lake by itself


def entry(id: str, first: int, end: int, files: list[str] | None = None) -> Entry:
    covered = OffsetRange("t", "u", 0, first, end, end - first, 0, 0)
    return Entry(id, first, files or [], [covered])


def test_offsets_are_added_once(tmp_path: Path) -> None:
    lake = Lake.at(str(tmp_path))
    ends = lake.ends()
    lake.add(entry("a", 0, 10), ends)
    lake.add(entry("b", 10, 12), ends)
    assert lake.ends() == ends == {("t", "u", 0): 12}
    with pytest.raises(ArchiveInvalid, match="another run archives the topic here"):
        lake.add(entry("c", 11, 20), ends)
    assert [one.id for one in lake.entries()] == ["a", "b"]


def test_what_a_crash_left_staged_is_moved_by_whoever_comes_next(tmp_path: Path) -> None:
    lake = Lake.at(str(tmp_path))
    for id in ("done", "open"):
        folder = Path(lake.stage_url(id)) / "topic=t" / "date=2026-11-19"
        folder.mkdir(parents=True)
        (folder / "part-00003-5d9f-c0de.c001.snappy.parquet").write_bytes(b"x")
    names = lake.staged_names("done")
    assert names == ["topic=t/date=2026-11-19/done-00003-001.parquet"]
    lake.add(entry("done", 0, 1, names), lake.ends())
    for _ in range(2):
        lake.finish_all()
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("topic=t/*/*")] == names
    # The other one was never added: it is written again, from nothing.
    assert lake.staged_names("open")
    lake.stage_url("open")
    assert not lake.staged_names("open")


def test_an_entry_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    lake = Lake.at(str(tmp_path))
    lake.add(entry("a", 0, 1), lake.ends())
    [path] = tmp_path.glob("_millstream/entries/*.json")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ArchiveInvalid, match="cannot be read"):
        lake.entries()
