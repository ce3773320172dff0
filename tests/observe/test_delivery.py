"""Work queues on the metrics page."""

from __future__ import annotations

from broker.leasing import house_of, publish, receive, settle
from broker.making import House
from millstream.broker.publishing import Outgoing
from millstream.log.batch import LANES
from millstream.observe.delivery import NAMES, TEXTS, delivery_metrics, lane_metrics


def test_how_deliveries_end_is_counted_in_all_and_by_group() -> None:
    house = house_of()
    publish(house, *"abc")
    first, second, _ = receive(house, group="one")
    settle(house, "ack", first)
    settle(house, "nack", second, delay_ms=60_000)
    receive(house, group="two", count_max=1)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in delivery_metrics(house.broker.delivery)
        for sample in family.samples
    }
    assert values["millstream_delivery_delivered_total",] == 4
    assert values["millstream_group_delivery_delivered_total", "one"] == 3
    assert values["millstream_group_delivery_acked_total", "one"] == 1
    assert values["millstream_group_delivery_nacked_total", "two"] == 0
    assert values["millstream_group_delivery_leased", "one", "jobs"] == 1
    assert values["millstream_group_delivery_waiting", "one", "jobs"] == 1
    assert values["millstream_group_delivery_ready", "two", "jobs"] == 2


def test_only_so_many_groups_are_listed_and_the_others_are_in_the_totals() -> None:
    house = house_of()
    publish(house, *"abc")
    receive(house, group="busy")
    receive(house, group="idle", count_max=1)
    families = list(delivery_metrics(house.broker.delivery, groups_max=1))
    groups = {one.labels["group"] for family in families for one in family.samples if one.labels}
    totals = {one.name: one.value for family in families for one in family.samples}
    assert groups == {"busy"}
    assert totals["millstream_delivery_delivered_total"] == 4


def test_every_count_says_what_it_is() -> None:
    assert set(TEXTS) <= set(NAMES)


def publish_in_lanes(house: House, *lanes: str, topic: str = "jobs") -> None:
    records = [Outgoing(None, b"v", partition=0, lane=LANES.index(lane)) for lane in lanes]
    house.done(house.broker.publisher.publish(topic, records))


def test_each_lane_of_a_topic_that_uses_lanes_is_counted() -> None:
    house = house_of()
    publish_in_lanes(house, "critical", "critical", "low")
    assert len(receive(house, count_max=1)) == 1
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in delivery_metrics(house.broker.delivery)
        for sample in family.samples
    }
    assert found["millstream_lane_ready", "g", "jobs", "critical"] == 1
    assert found["millstream_lane_inflight", "g", "jobs", "critical"] == 1
    assert found["millstream_lane_delivered_total", "g", "jobs", "critical"] == 1
    assert found["millstream_lane_ready", "g", "jobs", "low"] == 1
    assert found["millstream_lane_delivered_total", "g", "jobs", "normal"] == 0


def test_lanes_are_listed_of_the_busiest_and_not_of_topics_without_them() -> None:
    house = house_of()
    for topic in ("busy", "idle"):
        house.done(house.broker.topics.create(topic, 1))
        publish_in_lanes(house, "high", "low", topic=topic)
    publish(house, "a")
    receive(house)
    receive(house, topic="busy")
    receive(house, topic="idle", count_max=1)
    listed = {
        sample.labels["topic"]
        for family in lane_metrics(house.broker.delivery, shares_max=1)
        for sample in family.samples
    }
    assert listed == {"busy"}
    everything = lane_metrics(house.broker.delivery)
    topics = {one.labels["topic"] for family in everything for one in family.samples}
    assert topics == {"busy", "idle"}
