"""Settings of the Kafka listener, as rows of the one table in config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.kinds import Integer, Kind, ListenAddress, Size

_MIB = 1 << 20
# Of a request and its batch, beside the records: names, ids, and the batch's own header.
PRODUCE_OVERHEAD_BYTES = 4 << 10

KAFKA_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "kafka",
        "kafka",
        ListenAddress(),
        "off",
        "Where the Kafka protocol is served; Kafka's own port is 9092. There is no access control "
        "yet: an address other than the loopback lets everyone who can reach it in. With "
        "`tls_cert` it speaks TLS and nothing else, unless there is `kafka_tls`. Port 0 takes a "
        "free port.",
    ),
    (
        "kafka_tls",
        "kafka_tls",
        ListenAddress(),
        "off",
        "A second address for the Kafka protocol, which speaks TLS with the certificate of "
        "`tls_cert`. `kafka` is then the plain one, whatever `tls_cert` says; `off` there leaves "
        "this one alone. Both share the limits below.",
    ),
    (
        "kafka_advertised",
        "kafka_advertised",
        ListenAddress(),
        "off",
        "Where Kafka's clients are told to connect: they ask once, and then go where they are "
        "told. `off` tells each the address at which it reached the broker, which is right unless "
        "something in between translates addresses, such as a container's published port.",
    ),
    (
        "kafka_tls_advertised",
        "kafka_tls_advertised",
        ListenAddress(),
        "off",
        "The same for clients that come by `kafka_tls`: each is told an address that speaks as the "
        "one that it came by.",
    ),
    (
        "kafka_connections_max",
        "kafka_connections_max",
        Integer(1, 2**31 - 1, otherwise="auto"),
        "auto",
        "How many connections `kafka` and `kafka_tls` have open at a time, together; one more is "
        "closed at once. A client opens two or three. `auto` is half of what `connections_max` "
        "comes to.",
    ),
    (
        "kafka_request_bytes_max",
        "kafka_request_bytes_max",
        Size(64 * 1024, 1 << 30),
        "100M",
        "The largest request of a Kafka client. A larger one ends its connection. It has to hold "
        "all batches that a producer sends at once.",
    ),
    (
        "kafka_requests_max",
        "kafka_requests_max",
        Integer(1, 100_000),
        "100",
        "How many requests of one connection may wait for their answers. While as many do, the "
        "connection is not read.",
    ),
    (
        "kafka_buffer_bytes_max",
        "kafka_buffer_bytes_max",
        Size(_MIB, 1 << 40),
        "512M",
        "How many bytes all Kafka connections hold together: requests that arrive or wait for "
        "their answers, and answers that are not read. While they hold as many, none is read.",
    ),
    (
        "kafka_fetch_bytes_max",
        "kafka_fetch_bytes_max",
        Size(1024, 1 << 30),
        "55M",
        "About how many bytes one fetch gives, whatever its client asks for; the first batch "
        "always comes whole.",
    ),
)


def largest_produce(values: Mapping[str, Any]) -> int:
    """A request that has one batch, of any topic that has no settings of its own."""
    largest = max(values["batch_bytes_max"], values["message_bytes_max"])
    return int(largest) + PRODUCE_OVERHEAD_BYTES
