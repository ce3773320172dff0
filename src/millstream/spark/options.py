"""The options of the data source and of the sink, in one table.

Names are those of Spark's Kafka connector, so that a job moves by changing the format's name; what
it does not have is ours. Spark hands options over as text and without regard to case. All of them
are checked together, before anything is asked of a broker, and each error names the option, its
value, and what would be right.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millstream.errors import OptionInvalid, SettingInvalid
from millstream.kinds import Choice, Integer, Kind, Size
from millstream.wire.places import DEFAULT_SERVER, Place

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
KAFKA_PREFIX = "kafka."
# Of a wrong value, what is said back.
SHOWN_MAX = 200


# ---- kinds that settings of the broker do not have


@dataclass(frozen=True, slots=True)
class Boolean:
    expects: str = "true or false"

    def parse(self, text: str) -> bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("is neither")
        return text.lower() == "true"

    def show(self, value: object) -> str:
        return str(value).lower()


@dataclass(frozen=True, slots=True)
class Text:
    expects: str = "a text that is not empty"

    def parse(self, text: str) -> str:
        if not text:
            raise ValueError("is empty")
        return text

    def show(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Words:
    """Several, with commas between them."""

    expects: str

    def parse(self, text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if not words:
            raise ValueError("names none")
        return words

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return ",".join(value)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Read further where it is used: what is right depends on the option."""

    expects: str

    def parse(self, text: str) -> dict[str, object]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError("is no JSON object")
        return found

    def show(self, value: object) -> str:
        return json.dumps(value)


_UNITS_MS = {
    "": 1,
    "us": 0.001,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


@dataclass(frozen=True, slots=True)
class SparkTime:
    """As Spark writes times: `15m`, `30s`, and a bare number is milliseconds."""

    expects: str = "a time as Spark writes it, such as 500ms, 30s, 15m or 1h"

    def parse(self, text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.lower())
        if match is None or match[2] not in _UNITS_MS:
            raise ValueError("is no time")
        return int(int(match[1]) * _UNITS_MS[match[2]])

    def show(self, value: object) -> str:
        return f"{value}ms"


@dataclass(frozen=True, slots=True)
class SecurityProtocol:
    expects: str = "`ssl` or `plaintext`, and an address without SASL"

    def parse(self, text: str) -> str:
        word = text.lower()
        if word in ("sasl_ssl", "sasl_plaintext"):
            raise ValueError("needs SASL, and there is none here yet")
        if word not in ("ssl", "plaintext"):
            raise ValueError("is neither")
        return word

    def show(self, value: object) -> str:
        return str(value)


# ---- the table


class Option(NamedTuple):
    """One row. `default` is of the parsed kind; `about` is what the option causes."""

    name: str
    kind: Kind
    default: object
    about: str


_PER_PARTITION = "a JSON object of topics and partitions, such as"
_TIMES = f'{_PER_PARTITION} {{"orders": {{"0": 1735689600000}}}}, in milliseconds'
_COUNT = Integer(1, INT64_MAX)

# Where the broker is: source and sink.
BROKER_ROWS = (
    Option("servers", Words("addresses such as host:9092,other:9092"), None, "Kafka addresses."),
    Option(
        "kafka.bootstrap.servers",
        Words("addresses such as host:9092,other:9092"),
        None,
        "The same, by the name that Spark's Kafka connector has for it.",
    ),
    Option(
        "server",
        Text(f"the URL of a Millstream broker, such as {DEFAULT_SERVER}"),
        None,
        "The HTTP address of a Millstream broker. Either address is enough.",
    ),
    Option("ca", Text("the path of a file of certificates"), None, "Trusted besides the system's."),
    Option(
        "kafka.security.protocol",
        SecurityProtocol(),
        None,
        "TLS towards Kafka addresses. By default as the `server` URL says.",
    ),
    Option("kafka.client.id", Text(), "millstream-spark", "Shown in the broker's log."),
    Option(
        "kafkaConsumer.pollTimeoutMs",
        Integer(1, INT32_MAX),
        120_000,
        "How long a broker may be away, or silent, before the query fails.",
    ),
)

SOURCE_ROWS = (
    Option("subscribe", Words("topics such as orders,payments"), None, "The topics to read."),
    Option("subscribePattern", Text("a regular expression"), None, "Topics whose whole name fits."),
    Option(
        "assign",
        JsonObject('a JSON object such as {"orders": [0, 1]}'),
        None,
        "Only these partitions.",
    ),
    Option(
        "startingOffsets",
        Text('earliest, latest, committed, or a JSON object such as {"orders": {"0": 23}}'),
        None,
        "Where a new query starts. Default: latest for streams, earliest for batches.",
    ),
    Option("startingTimestamp", Integer(0, INT64_MAX), None, "Start at records of this time (ms)."),
    Option("startingOffsetsByTimestamp", JsonObject(_TIMES), None, "The same for each partition."),
    Option(
        "startingOffsetsByTimestampStrategy",
        Choice(("error", "latest")),
        "error",
        "When no record is that new: fail, or start at the end.",
    ),
    Option(
        "endingOffsets",
        Text('latest, or a JSON object such as {"orders": {"0": 50}}'),
        None,
        "Where a batch ends, exclusive. Default: latest.",
    ),
    Option("endingTimestamp", Integer(0, INT64_MAX), None, "End before records of this time (ms)."),
    Option("endingOffsetsByTimestamp", JsonObject(_TIMES), None, "The same for each partition."),
    Option("maxOffsetsPerTrigger", _COUNT, None, "The most offsets of a micro-batch."),
    Option("minOffsetsPerTrigger", _COUNT, None, "Wait until so many are there, or"),
    Option("maxTriggerDelay", SparkTime(), 900_000, "so much time is over."),
    Option(
        "maxBytesPerTrigger",
        Size(1),
        None,
        "About the most bytes of a micro-batch, as they are stored.",
    ),
    Option("minPartitions", Integer(1, INT32_MAX), None, "At least about so many tasks."),
    Option("maxRecordsPerPartition", _COUNT, None, "At most so many offsets a task."),
    Option(
        "failOnDataLoss",
        Boolean(),
        True,
        "When records are gone before they were read: fail, or skip them and say so in the log.",
    ),
    Option("includeHeaders", Boolean(), False, "The column `headers`."),
    Option("includeLane", Boolean(), False, "The column `lane`."),
    Option("includeDeadLetter", Boolean(), False, "The column `dead_letter`."),
    Option(
        "columns",
        Words("columns such as key,offset"),
        None,
        "Only these columns, in this order; what is left out is not made, nor sent to Spark.",
    ),
    Option(
        "valueFormat", Choice(("bytes", "text", "json")), "bytes", "What the column `value` holds."
    ),
    Option(
        "valueSchema",
        Text("columns as in SQL, such as `id BIGINT, total DOUBLE`"),
        None,
        "With `valueFormat=json`: the fields of a value. The column `value` is a struct of them.",
    ),
    Option(
        "valueMode",
        Choice(("permissive", "failfast")),
        "permissive",
        "A value that does not fit: nulls and the text in `_corrupt_record`, or the query fails.",
    ),
    Option(
        "access",
        Choice(("auto", "wire", "files")),
        "auto",
        "The way to the bytes: from the broker, from its segment files, or from files where "
        "they can be seen.",
    ),
    Option(
        "groupId",
        Text("a group's name"),
        None,
        "The group to which offsets of finished micro-batches are committed, and that "
        "`startingOffsets=committed` means.",
    ),
    Option("kafka.group.id", Text("a group's name"), None, "The same."),
    Option(
        "kafka.isolation.level",
        Choice(("read_committed", "read_uncommitted")),
        "read_committed",
        "Whether records of transactions that are open or aborted are read.",
    ),
    Option(
        "kafka.max.partition.fetch.bytes",
        Integer(1, INT32_MAX),
        8 * 2**20,
        "Bytes asked for at once over the wire.",
    ),
    Option(
        "includeArchive",
        Text("the folder of an archive"),
        None,
        "In a batch: what `mill pipeline run archive` put there of the topics comes from its "
        "files, and only what came since from the broker.",
    ),
    Option(
        "pushFilters",
        Choice(("auto", "true", "false")),
        "auto",
        "Whether filters on offset, timestamp, partition and topic choose what a batch reads. "
        "`auto`: where Spark keeps the filters of two queries apart, which 4.3.0 does not.",
    ),
)

# A table made with `CREATE TABLE` is read and written with the same options, so either side lets
# the other's pass.
SINK_ROWS = (
    Option("topic", Text("a topic's name"), None, "Where rows go, whatever their column `topic`."),
    Option(
        "compression",
        Choice(("none", "gzip", "snappy", "lz4", "zstd")),
        "lz4",
        "How batches are compressed, on the wire and in the log.",
    ),
    Option(
        "kafka.compression.type",
        Choice(("none", "gzip", "snappy", "lz4", "zstd")),
        None,
        "The same, by the name that Spark's Kafka connector has for it.",
    ),
    Option(
        "batchSize",
        Size(1024, 64 * 2**20),
        512 * 1024,
        "The most bytes of a batch before it is compressed. A larger row is a batch of its own.",
    ),
    Option(
        "kafka.max.request.size",
        Size(1, 2**31 - 1),
        None,
        "To another broker: the most bytes of a row before it is compressed, and of a request of "
        "several batches. Default: whatever the topic takes.",
    ),
    Option(
        "includeHeaders",
        Boolean(),
        True,
        "Whether the column `headers` is written, where there is one.",
    ),
    Option(
        "onError",
        Choice(("fail", "deadletter")),
        "fail",
        "A row that cannot be a record: the task fails and says why, or the row goes to the dead "
        "letters of its topic.",
    ),
    Option(
        "writer",
        Text("1 to 249 letters, digits, dots, underscores and hyphens"),
        None,
        "The name by which the broker knows what was written already. Default: the query's id.",
    ),
    Option(
        "batch",
        Integer(0, INT64_MAX),
        None,
        "With `writer`, in a batch write: its number. One that is committed is not written again.",
    ),
    Option(
        "commitTimeout",
        SparkTime(),
        600_000,
        "How long a broker that is away or busy is waited for, in a task and in a commit.",
    ),
)

# Of Spark's connector, and of Kafka's consumers: accepted, so that a job moves as it is, and
# without effect, because nothing here needs tuning by them.
WITHOUT_EFFECT = frozenset(
    (
        "groupIdPrefix",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
        "partition.metadata.cache.ttl.ms",
        *(
            KAFKA_PREFIX + name
            for name in (
                "acks",
                "allow.auto.create.topics",
                "batch.size",
                "buffer.memory",
                "check.crcs",
                "client.dns.lookup",
                "client.rack",
                "connections.max.idle.ms",
                "default.api.timeout.ms",
                "delivery.timeout.ms",
                "enable.idempotence",
                "enable.metrics.push",
                "exclude.internal.topics",
                "fetch.max.bytes",
                "fetch.max.wait.ms",
                "fetch.min.bytes",
                "group.instance.id",
                "group.protocol",
                "heartbeat.interval.ms",
                "linger.ms",
                "max.block.ms",
                "max.in.flight.requests.per.connection",
                "max.poll.interval.ms",
                "max.poll.records",
                "metadata.max.age.ms",
                "metric.reporters",
                "metrics.num.samples",
                "metrics.recording.level",
                "metrics.sample.window.ms",
                "partition.assignment.strategy",
                "receive.buffer.bytes",
                "reconnect.backoff.max.ms",
                "reconnect.backoff.ms",
                "request.timeout.ms",
                "retries",
                "retry.backoff.max.ms",
                "retry.backoff.ms",
                "send.buffer.bytes",
                "session.timeout.ms",
                "socket.connection.setup.timeout.max.ms",
                "socket.connection.setup.timeout.ms",
            )
        ),
    )
)

# What cannot be done here, and what to do instead.
_REFUSED = {
    "kafka.auto.offset.reset": "set startingOffsets to earliest or latest: a query keeps its own "
    "offsets, and starts from them only when it is new",
    "kafka.key.deserializer": "keys are given as bytes; take them apart with functions of Spark",
    "kafka.value.deserializer": "values are given as valueFormat says, or take them apart with "
    "functions of Spark",
    "kafka.key.serializer": "keys are written as bytes or text; make them with functions of Spark",
    "kafka.value.serializer": "values are written as bytes or text; make them with functions of "
    "Spark",
    "kafka.enable.auto.commit": "name a groupId: offsets are committed as batches finish",
    "kafka.interceptor.classes": "interceptors are Java classes, and there is no Java client here",
    "kafka.partitioner.class": "keys choose partitions as those of Kafka's own clients do, and the "
    "column `partition` chooses any other",
    "kafka.ssl.endpoint.identification.algorithm": "names in certificates are always checked; give "
    "the broker a certificate for the name that it has here",
}
# The same for all that begin so; the first that fits counts.
_REFUSED_GROUPS = {
    "kafka.sasl.": "there is no SASL here yet; use an address without",
    "kafka.ssl.truststore.": "name a file of PEM certificates with `ca`",
    "kafka.ssl.key": "certificates of clients are not sent",
    "kafka.ssl.": "TLS is as Python's own; name a file of PEM certificates to trust with `ca`",
}


# A path that nobody gave, what a stream was told that is for Spark itself, and what the catalog
# keeps of a table.
_SPARKS_OWN = frozenset(
    (
        "path",
        "queryname",
        "checkpointlocation",
        "provider",
        "location",
        "external",
        "owner",
        "comment",
        "collation",
        "is_managed_location",
    )
)


# ---- reading


def plain(given: Mapping[str, str]) -> dict[str, str]:
    """The options as they were written: those of a table in Spark's catalog come with a prefix,
    or twice, with and without."""
    ours = {name: text for name, text in given.items() if not _has_prefix(name)}
    prefixed = {
        name[len(_TABLE_PREFIX) :]: text for name, text in given.items() if _has_prefix(name)
    }
    there = {name.lower() for name in ours}
    return ours | {name: text for name, text in prefixed.items() if name.lower() not in there}


def _has_prefix(name: str) -> bool:
    return name.lower().startswith(_TABLE_PREFIX)


_TABLE_PREFIX = "option."


def read_options(
    given: Mapping[str, str], rows: Sequence[Option], ignored: Iterable[Option] = ()
) -> dict[str, object]:
    """Every row's value by its name, and what was not given as its default.

    OptionInvalid for one that is not in `rows` nor in `ignored`, or has a value it cannot have.
    """
    table = {row.name.lower(): row for row in rows}
    known = {row.name.lower() for row in ignored} | {name.lower() for name in WITHOUT_EFFECT}
    values = {row.name: row.default for row in rows}
    for name, text in plain(given).items():
        row = table.get(name.lower())
        if row is not None:
            values[row.name] = _parsed(row, str(text))
        elif name.lower() not in known and not _is_sparks_own(name):
            raise _unknown(name, str(text), [*table.values(), *ignored])
    return values


def was_given(given: Mapping[str, str], name: str) -> bool:
    return any(other.lower() == name.lower() for other in plain(given))


def given_text(given: Mapping[str, str], name: str) -> str:
    """An option as it was written: what an error says of it is what its user can look for."""
    return next((str(t) for other, t in plain(given).items() if other.lower() == name.lower()), "")


def _parsed(row: Option, text: str) -> object:
    text = text.strip()
    try:
        return row.kind.parse(text)
    except ValueError as error:
        raise option_invalid(row.name, text, f"which {error}; use {row.kind.expects}") from None


def _is_sparks_own(name: str) -> bool:
    return name.lower() in _SPARKS_OWN


def _unknown(name: str, value: str, rows: Iterable[Option]) -> OptionInvalid:
    lower = name.lower()
    groups = (why for start, why in _REFUSED_GROUPS.items() if lower.startswith(start))
    refused = _REFUSED.get(lower) or next(groups, None)
    if refused is not None:
        return option_invalid(name, value, f"and this option is not supported; {refused}")
    return option_invalid(name, value, f"and there is no such option; {_instead(name, rows)}")


def _instead(name: str, rows: Iterable[Option]) -> str:
    """What a name that there is not may stand for. A common prefix makes no two names alike."""
    is_kafkas = name.lower().startswith(KAFKA_PREFIX)
    names = [row.name for row in rows] + sorted(WITHOUT_EFFECT)
    if is_kafkas:
        names = [one for one in names if one.startswith(KAFKA_PREFIX)]
    by_lower = {known.lower().removeprefix(KAFKA_PREFIX): known for known in names}
    wanted = name.lower().removeprefix(KAFKA_PREFIX)
    near = difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.6)
    if near:
        return f"did you mean {by_lower[near[0]]!r}?"
    if is_kafkas:
        return "Kafka's clients have settings that say nothing here; leave it out"
    return "leave it out"


def option_invalid(name: str, value: object, why: str) -> OptionInvalid:
    """Of a whole option: `value` is what was given."""
    shown = _shown(value)
    return OptionInvalid(f"the option {name} is {shown!r}, {why}", option=name, value=shown)


def part_invalid(name: str, value: object, why: str, *, place: str = "") -> OptionInvalid:
    """Of one of several: addresses, say, or what an option has for a partition, the `place`."""
    shown = _shown(value)
    where = f" for {place}" if place else ""
    return OptionInvalid(f"the option {name} has {shown!r}{where}, {why}", option=name, value=shown)


def _shown(value: object) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= SHOWN_MAX else shown[:SHOWN_MAX] + "…"


# ---- where the broker is


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """What is known before anything is asked; one of `servers` and `url` is there."""

    servers: tuple[str, ...]
    url: str | None
    ca: str | None
    # None: as the URL says, and without a URL not.
    is_secure: bool | None
    client_id: str
    patience_s: float

    @property
    def uses_tls(self) -> bool:
        if self.is_secure is not None:
            return self.is_secure
        return self.url is not None and self.url.startswith("https:")


def read_place(values: Mapping[str, object], environment: Mapping[str, str]) -> BrokerPlace:
    """Of the values of BROKER_ROWS."""
    by_ours, by_kafkas = values["servers"], values["kafka.bootstrap.servers"]
    if by_ours is not None and by_kafkas is not None and by_ours != by_kafkas:
        raise option_invalid(
            "kafka.bootstrap.servers",
            ",".join(_words(by_kafkas)),
            "and the option servers says something else; give one of the two",
        )
    servers = _words(by_ours or by_kafkas or ())
    name = "servers" if by_ours else "kafka.bootstrap.servers"
    for address in servers:
        _check_address(name, address)
    url = values["server"]
    if url is None and not servers:
        url = environment.get("MILLSTREAM_SERVER") or DEFAULT_SERVER
    if url is not None:
        try:
            url = Place.of(str(url)).url
        except SettingInvalid:
            why = f"which is no URL of a broker; use one such as {DEFAULT_SERVER}"
            if values["server"] is not None:
                raise option_invalid("server", url, why) from None
            raise OptionInvalid(
                f"MILLSTREAM_SERVER, which counts without the options server and servers, is "
                f"{url!r}, {why}",
                option="server",
                value=str(url),
            ) from None
    ca = values["ca"]
    if ca is not None and not os.path.isfile(str(ca)):
        raise option_invalid("ca", ca, "and there is no such file; name a file of certificates")
    protocol = values["kafka.security.protocol"]
    patience_ms = values["kafkaConsumer.pollTimeoutMs"]
    assert isinstance(patience_ms, int)
    return BrokerPlace(
        servers=servers,
        url=None if url is None else str(url),
        ca=None if ca is None else str(ca),
        is_secure=None if protocol is None else protocol == "ssl",
        client_id=str(values["kafka.client.id"]),
        patience_s=patience_ms / 1000,
    )


def _words(value: object) -> tuple[str, ...]:
    assert isinstance(value, tuple)
    return value


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port; None when it is no address, as a URL is none."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host, int(port)


def _check_address(name: str, address: str) -> None:
    if split_address(address) is None:
        raise part_invalid(name, address, "which is no address; use one such as host:9092")
