"""What the configs of the broker say to a client that came to it one way or another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.making import local_house
from certificates import Pair
from millstream.broker.topic_settings import UNLIMITED, parse_settings
from millstream.config import TABLE, load_settings
from millstream.errors import BatchTooLarge, TopicSettingInvalid
from millstream.kinds import Address
from millstream.listeners.kafka.configs import (
    DEFAULT,
    OF_BROKER,
    OF_TOPIC,
    STRING,
    Config,
    broker_configs,
    describe,
    read_configs,
    with_http,
)
from millstream.listeners.kafka.context import Context
from millstream.log import batch as batches

HERE = Address("10.1.1.1", 9092)


def url(http: Address | None, *, here: Address = HERE, is_secure: bool = False) -> Any:
    nothing: Any = None
    context = Context(nothing, nothing, nothing, nothing, 1, http=http, is_secure=is_secure)
    call: Any = SimpleNamespace(here=here)
    return context.http_url(call)


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_http_that_listens_everywhere_is_where_the_client_came_to(everywhere: str) -> None:
    http = Address(everywhere, 8080)
    assert url(http) == "http://10.1.1.1:8080"
    assert url(http, here=Address("broker.example", 19092)) == "http://broker.example:8080"


def test_http_is_where_it_listens() -> None:
    assert url(Address("127.0.0.1", 8080)) == "http://127.0.0.1:8080"
    assert url(Address("::1", 8080), is_secure=True) == "https://[::1]:8080"
    assert url(None) is None


def test_without_http_there_is_no_config_that_says_where_it_is() -> None:
    one = Config("millstream.http", "off", STRING, 4, True, "where")
    other = Config("millstream.kafka", "127.0.0.1:9092", STRING, 4, True, "where")
    assert with_http([one, other], None) == [other]
    assert with_http([one, other], "http://x:1") == [one._replace(value="http://x:1"), other]


@pytest.mark.parametrize(
    ("flags", "shown", "source"),
    [
        ({}, "PLAINTEXT://127.0.0.1:9092", DEFAULT),
        ({"kafka_advertised": "k.example:1"}, "PLAINTEXT://k.example:1", OF_BROKER),
        ({"tls": "on"}, "SSL://127.0.0.1:9092", DEFAULT),
        (
            {"tls": "on", "kafka_tls": "127.0.0.1:9093"},
            "PLAINTEXT://127.0.0.1:9092,SSL://127.0.0.1:9093",
            DEFAULT,
        ),
        (
            {
                "tls": "on",
                "kafka": "off",
                "kafka_tls": "127.0.0.1:9093",
                "kafka_tls_advertised": "k.example:2",
            },
            "SSL://k.example:2",
            OF_BROKER,
        ),
    ],
)
def test_the_addresses_that_clients_are_told_are_shown_with_how_they_speak(
    tmp_path: Path, flags: dict[str, str], shown: str, source: int
) -> None:
    given = {"kafka": "127.0.0.1:9092", **flags}
    if given.pop("tls", None):
        pair = Pair(tmp_path)
        given |= {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    settings = load_settings(flags=given, environment={})
    configs = broker_configs(
        (row, getattr(settings, row.attribute), settings.origins[row.name]) for row in TABLE
    )
    [found] = [one for one in configs if one.name == "advertised.listeners"]
    assert (found.value, found.source) == (shown, source)


def test_the_largest_batch_is_described_as_it_is() -> None:
    house = local_house().start()
    topics = house.broker.topics
    for settings, bytes_max in (({}, None), ({"message_bytes_max": 5000}, "5000")):
        name = f"t{len(topics)}"
        topic = house.done(topics.create(name, 1, settings))
        configs = {one.name: one for one in describe(topic, topics.batch_bytes_max(topic))}
        shown = configs["max.message.bytes"]
        assert shown.source == (OF_TOPIC if settings else DEFAULT)
        if bytes_max is not None:
            assert shown.value == bytes_max
            continue
        # A batch of that size, and one that is a byte larger.
        size = int(shown.value)
        over = len(batches.encode([(0, None, b"x" * size, [])])) - size
        fitting, larger = (
            batches.encode([(0, None, b"x" * (size - over + more), [])]) for more in (0, 1)
        )
        assert len(fitting) == size
        house.done(house.broker.sealed_batches.append(name, 0, fitting)[0])
        with pytest.raises(BatchTooLarge):
            house.broker.sealed_batches.append(name, 0, larger)


CENTURY_MS = 3_155_760_000_000


@pytest.mark.parametrize(
    ("name", "least", "most", "has_no_limit"),
    [
        ("delete.retention.ms", 0, CENTURY_MS, False),
        ("max.message.bytes", 1, 64 << 20, False),
        ("retention.bytes", 64 << 10, 1 << 60, True),
        ("retention.ms", 1000, CENTURY_MS, True),
        ("segment.bytes", 64 << 10, 2 << 30, False),
        ("segment.ms", 1000, CENTURY_MS, False),
    ],
)
def test_a_number_is_refused_with_the_bounds_that_a_config_has_and_in_its_own_words(
    name: str, least: int, most: int, has_no_limit: bool
) -> None:
    for number in (least, most):
        # Of what is taken here nothing is refused later, in the words of our table.
        assert [*parse_settings(read_configs({name: str(number)})).values()] == [number]
    wrong = [str(least - 1), str(most + 1), "2m", "unlimited"]
    if has_no_limit:
        assert [*parse_settings(read_configs({name: "-1"})).values()] == [UNLIMITED]
    else:
        wrong.append("-1")
    for text in wrong:
        with pytest.raises(TopicSettingInvalid) as refused:
            read_configs({name: text})
        right = f"a whole number from {least} to {most}"
        right += ", or -1 for no limit" if has_no_limit else ""
        assert refused.value.message == f"the config {name} cannot be {text!r}; use {right}"
