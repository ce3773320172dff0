"""What the metrics page says of topics."""

from __future__ import annotations

from broker.making import House, memory_house
from millstream.broker.publishing import Outgoing
from millstream.observe.metrics import Metrics
from millstream.observe.topics import topic_metrics


def values(house: House, topics_max: int = 0) -> dict[str, object]:
    metrics = Metrics()
    metrics.register(lambda: topic_metrics(house.broker, topics_max))
    return metrics.values()


def publish(house: House, topic: str, count: int) -> None:
    house.done(house.broker.publisher.publish(topic, [Outgoing(None, b"x" * 100)] * count))


def test_totals_are_there_and_grow() -> None:
    house = memory_house()
    publish(house, "a", 3)
    publish(house, "b", 2)
    house.done(house.broker.reader.fetch("a", 0, 0, 2, 1 << 20))
    for _ in range(2):
        house.done(house.broker.publisher.publish("a", [Outgoing(None, b"")], idempotency_key="k"))
    page = values(house)
    assert page["millstream_topics"] == 2
    assert page["millstream_topic_partitions"] == 6
    assert page["millstream_messages_published_total"] == 6
    assert page["millstream_messages_read_total"] == 2
    assert page["millstream_publishes_repeated_total"] == 1
    assert page["millstream_idempotency_keys"] == 1
    assert page["millstream_view_changes_undone_total"] == 0
    assert not [name for name in page if name.startswith("millstream_topic_messages")]


def test_the_busiest_topics_are_listed_by_name_and_no_others() -> None:
    house = memory_house()
    for number in range(6):
        publish(house, f"t{number}", number + 1)
    page = values(house, 2)
    rows = page["millstream_topic_messages_published_total"]
    assert isinstance(rows, list)
    assert {row["labels"]["topic"]: row["value"] for row in rows} == {"t5": 6, "t4": 5}
    sizes = page["millstream_topic_log_bytes"]
    assert isinstance(sizes, list)
    assert {row["labels"]["topic"] for row in sizes} == {"t5", "t4"}
    house.done(house.broker.topics.delete("t5"))
    assert house.broker.traffic.total().messages_in == 21
    rows = values(house, 2)["millstream_topic_messages_published_total"]
    assert isinstance(rows, list)
    assert {row["labels"]["topic"] for row in rows} == {"t4", "t3"}
    # The page answers also when the log is closed.
    house.engine.close()
    assert values(house, 2)["millstream_messages_published_total"] == 21
