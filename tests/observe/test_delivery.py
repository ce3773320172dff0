"""Work queues on the metrics page."""

from __future__ import annotations

from broker.leasing import house_of, publish, receive, settle
from millstream.observe.delivery import NAMES, TEXTS, delivery_metrics


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
