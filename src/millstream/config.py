"""One table of settings.

A flag beats the environment, which beats the file, which beats the default. Everything is
validated together, so that one start reports every wrong value and not only the first. Each row
of the table says what a setting causes; `docs/settings.md` and the flags of `mill` are made from
it. To add a setting: one row in TABLE and one field in Settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal

from millstream.config_delivery import DELIVERY_ROWS
from millstream.config_file import Problem, read_settings_file
from millstream.config_groups import GROUP_ROWS
from millstream.config_kafka import KAFKA_ROWS, largest_produce
from millstream.config_queues import QUEUE_ROWS
from millstream.config_retention import RETENTION_ROWS
from millstream.config_staged import STAGED_ROWS
from millstream.config_topics import TOPIC_ROWS
from millstream.errors import SettingInvalid
from millstream.kinds import (
    AbsentListener,
    Address,
    Choice,
    Directory,
    Duration,
    File,
    HostNames,
    Integer,
    Kind,
    ListenAddress,
    Size,
    show_duration,
    show_size,
)

ENVIRONMENT_PREFIX = "MILLSTREAM_"
ENVIRONMENT_CONFIG = "MILLSTREAM_CONFIG"
# Variables with our prefix that are not settings: the settings file, the broker that `mill` talks
# to and whom it trusts, and the switches of the build and the tests.
ENVIRONMENT_OTHERS = frozenset(
    {
        ENVIRONMENT_CONFIG,
        "MILLSTREAM_SERVER",
        "MILLSTREAM_CA",
        "MILLSTREAM_PURE",
        "MILLSTREAM_FAULTS",
        "MILLSTREAM_SOAK",
    }
)

SECOND_MS = 1_000
HOUR_MS = 3_600_000
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# The smallest batch limit that still takes a header and a few records.
BATCH_BYTES_MIN = KIB
# Index entries hold positions in 32 bits.
SEGMENT_BYTES_MAX = 2 * GIB


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: `name` in files, `--name` as a flag, MILLSTREAM_NAME in the environment."""

    name: str
    attribute: str
    kind: Kind
    default: str
    causes: str
    section: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is in force. Units stand last in the names; None is `off` or `unlimited`."""

    node_id: int
    data: str
    drain_timeout_ms: int
    open_files: int | None

    http: Address | None
    grpc: Address | None
    metrics: Address | None
    allowed_hosts: tuple[str, ...]
    connections_max: int | None
    tls_cert: str | None
    tls_key: str | None

    kafka: Address | None
    kafka_tls: Address | None
    kafka_advertised: Address | None
    kafka_tls_advertised: Address | None
    kafka_connections_max: int | None
    kafka_request_bytes_max: int
    kafka_requests_max: int
    kafka_buffer_bytes_max: int
    kafka_fetch_bytes_max: int

    queue_capacity: int
    queue_bytes_max: int
    queues_bytes_max: int
    queues_max: int
    message_bytes_max: int
    body_bytes_max: int
    snapshot_at_stop: Literal["on", "off"]
    snapshot_interval_ms: int | None

    topic_partitions: int
    topic_partitions_max: int
    partitions_max: int
    topics_max: int
    topic_auto_create: Literal["on", "off"]
    topic_message_bytes_max: int
    partitioner: Literal["murmur2", "murmur3"]
    idempotency_window_ms: int
    idempotency_keys_max: int
    metrics_topics: int
    view_snapshot_interval_ms: int

    group_session_timeout_ms: int
    group_heartbeat_interval_ms: int
    group_rebalance_timeout_ms: int
    group_forming_ms: int
    group_assignor: Literal["sticky", "range", "round_robin"]
    group_auto_offset_reset: Literal["earliest", "latest", "none"]
    group_auto_commit_interval_ms: int
    poll_records_max: int
    poll_bytes_max: int
    poll_timeout_max_ms: int
    groups_max: int
    group_members_max: int
    consumers_max: int
    visibility_ms: int
    deliveries_max: int
    retry_delay_ms: int
    schedules_max: int
    retry_delay_max_ms: int
    dead_letters: Literal["on", "off"]
    receive_records_max: int
    receive_bytes_max: int
    member_inflight_max: int
    group_inflight_max: int
    breaker_settlings_min: int
    breaker_window_ms: int
    breaker_failures_percent: int
    redrives_max: int
    redrive_history_ms: int
    offsets_retention_ms: int | None

    writers_max: int
    staged_parts_max: int
    commit_parts_max: int
    staged_bytes_max: int
    staged_retention_ms: int

    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["json", "pretty", "auto"]
    request_log: Literal["on", "off"]

    fsync: Literal["every", "interval", "none"]
    fsync_interval_ms: int
    batch_bytes_max: int
    bypass_bytes: int
    journal_bytes: int
    checkpoint_interval_ms: int
    segment_bytes: int
    segment_age_ms: int
    index_interval_bytes: int
    time_index_interval_ms: int
    producer_expiry_ms: int

    retention_age_ms: int | None
    retention_bytes: int | None
    retention_check_interval_ms: int
    compaction_interval_ms: int
    tombstone_retention_ms: int
    file_delete_delay_ms: int

    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def _section(section: str, *rows: tuple[str, str, Kind, str, str]) -> tuple[Setting, ...]:
    return tuple(
        Setting(name, attribute, kind, default, causes, section)
        for name, attribute, kind, default, causes in rows
    )


_THE_BROKER = _section(
    "The broker",
    (
        "node_id",
        "node_id",
        Integer(0, 2**31 - 1),
        "1",
        "The number by which clients and logs know this broker. It matters once several brokers "
        "share their work; each then needs its own.",
    ),
    (
        "data",
        "data",
        Directory(),
        "./data",
        "The directory that holds everything that survives a restart. It is made when it is "
        "missing. One broker at a time may use it: a second one is refused.",
    ),
    (
        "drain_timeout",
        "drain_timeout_ms",
        Duration(0, HOUR_MS),
        "10s",
        "How long a broker that was told to stop lets requests end before it closes their "
        "connections. Longer is kinder to clients. What is left of it, and at least 5 seconds, is "
        "for `snapshot_at_stop`; a service manager must wait that much longer.",
    ),
    (
        "open_files",
        "open_files",
        Integer(256, 2**31 - 1, otherwise="max"),
        "max",
        "How many files and connections the process may have open. `max` raises the soft limit "
        "to the hard one. Each partition needs a few files, each client one.",
    ),
)

_LISTENERS = _section(
    "Listeners",
    (
        "http",
        "http",
        ListenAddress(),
        "127.0.0.1:8080",
        "Where HTTP is served. There is no access control yet: an address other than the "
        "loopback lets everyone who can reach it in. Port 0 takes a free port.",
    ),
    (
        "grpc",
        "grpc",
        AbsentListener("gRPC"),
        "off",
        "Where gRPC is served. This version has no gRPC listener, so an address is refused.",
    ),
    (
        "metrics",
        "metrics",
        ListenAddress(),
        "127.0.0.1:9090",
        "Where the metrics and health pages are served, apart from everything else. It answers "
        "from the first moment of a start to the last of a stop, so probes belong here.",
    ),
    (
        "allowed_hosts",
        "allowed_hosts",
        HostNames(),
        "",
        "Further names by which clients may call this broker in the `Host` header. Addresses, "
        "`localhost` and the names in `http` and `metrics` are always allowed; every other name "
        "is refused, so that no web page can reach the broker through a name of its own. A "
        "leading dot takes in all names below it; `*` allows every name.",
    ),
    (
        "connections_max",
        "connections_max",
        Integer(1, 2**31 - 1, otherwise="auto"),
        "auto",
        "How many connections `http` has open at a time, WebSockets among them. One more is "
        "answered with 503 and `too_many_connections`, and closed. `auto` is four fifths of what "
        "`open_files` comes to, so that the broker can always open its own files.",
    ),
    (
        "tls_cert",
        "tls_cert",
        File(),
        "",
        "A file with the broker's certificate and those between it and its authority, in PEM. "
        "With it, `http`, `kafka` and `metrics` speak TLS (1.2 or newer) and nothing else; only "
        "`kafka` stays plain where `kafka_tls` stands beside it. The "
        "files are read again at SIGHUP: new connections then get the new certificate; a pair "
        "that cannot be used is refused with a message, and the old one stays.",
    ),
    (
        "tls_key",
        "tls_key",
        File(),
        "",
        "The file with the certificate's private key, in PEM, without a passphrase. Keep it "
        "readable for the broker's user alone.",
    ),
)

_LOGS = _section(
    "The broker's own messages",
    (
        "log_level",
        "log_level",
        Choice(("debug", "info", "warning", "error")),
        "info",
        "Which of the broker's own messages are written: this level and above.",
    ),
    (
        "log_format",
        "log_format",
        Choice(("json", "pretty", "auto")),
        "auto",
        "How they are written, to standard error. `json` is one object a line, `pretty` is for "
        "people, `auto` is pretty on a terminal and JSON elsewhere.",
    ),
    (
        "request_log",
        "request_log",
        Choice(("on", "off")),
        "off",
        "Whether each request over HTTP and Kafka's protocol is a message too, at the level "
        "`info`: method, path and status, or API, version and client id, with bytes, duration and "
        "who asked. It costs a good part of the request rate, so it is for finding things out.",
    ),
)

_DURABILITY = _section(
    "Durability",
    (
        "fsync",
        "fsync",
        Choice(("every", "interval", "none")),
        "every",
        "What a topic promises unless it says otherwise. `every`: an append is answered after it "
        "is on disk. `interval`: it is answered at once and synced within `fsync_interval`; a "
        "power cut loses what came since. `none`: the system writes when it likes.",
    ),
    (
        "fsync_interval",
        "fsync_interval_ms",
        Duration(1, HOUR_MS),
        "1s",
        "How often topics in mode `interval` are synced: the most that a power cut can take.",
    ),
    (
        "batch_bytes_max",
        "batch_bytes_max",
        Size(BATCH_BYTES_MIN, GIB),
        str(MIB + 12),
        "The largest batch that is accepted; a larger one is refused with `batch_too_large`. "
        "The default is that of Kafka: 1 MiB and the 12 bytes before the length field's end. A "
        "topic takes a batch of one message as large as `topic_message_bytes_max`, or as its own "
        "`message_bytes_max`, whatever this says: that many bytes and 128.",
    ),
    (
        "bypass_bytes",
        "bypass_bytes",
        Size(0, GIB),
        "64K",
        "From this size on, a batch skips the journal and its segment is synced instead, so that "
        "its bytes are not written twice. Smaller makes the disk sync more often.",
    ),
    (
        "journal_bytes",
        "journal_bytes",
        Size(MIB, 64 * GIB),
        "64M",
        "The size of the journal at which a checkpoint is made. Larger means fewer checkpoints, "
        "more disk, and more to replay after a crash.",
    ),
    (
        "checkpoint_interval",
        "checkpoint_interval_ms",
        Duration(SECOND_MS, 24 * HOUR_MS),
        "60s",
        "How long a broker that writes goes without a checkpoint. Longer means more to replay "
        "after a crash.",
    ),
    (
        "segment_bytes",
        "segment_bytes",
        Size(64 * KIB, SEGMENT_BYTES_MAX),
        "64M",
        "The size at which a partition starts a new file. Retention removes whole files, so a "
        "smaller size frees space sooner and opens more files.",
    ),
    (
        "segment_age",
        "segment_age_ms",
        Duration(SECOND_MS),
        "7d",
        "The age at which a partition starts a new file even when the old one is small, so that "
        "retention by age also reaches quiet partitions.",
    ),
    (
        "index_interval_bytes",
        "index_interval_bytes",
        Size(256, 64 * MIB),
        "4K",
        "One entry of the offset index for this many bytes of log. Smaller finds an offset with "
        "less reading, and makes the index larger.",
    ),
    (
        "time_index_interval",
        "time_index_interval_ms",
        Duration(1, HOUR_MS),
        "1s",
        "One entry of the time index for this span of timestamps. Smaller finds a time with less "
        "reading, and makes the index larger.",
    ),
    (
        "producer_expiry",
        "producer_expiry_ms",
        Duration(60 * SECOND_MS),
        "7d",
        "How long an idempotent producer that sends nothing is remembered. After that a repeated "
        "send is no longer known to be one.",
    ),
)

_RETENTION = _section("Retention and compaction", *RETENTION_ROWS)
_KAFKA = _section("Kafka", *KAFKA_ROWS)
_QUEUES = _section("Queues", *QUEUE_ROWS)

_TOPICS = _section("Topics", *TOPIC_ROWS)
_GROUPS = _section("Groups", *GROUP_ROWS)
_DELIVERY = _section("Work queues", *DELIVERY_ROWS)
_STAGED = _section("Staged writes", *STAGED_ROWS)

TABLE: tuple[Setting, ...] = (
    _THE_BROKER
    + _LISTENERS
    + _KAFKA
    + _LOGS
    + _QUEUES
    + _TOPICS
    + _GROUPS
    + _DELIVERY
    + _STAGED
    + _DURABILITY
    + _RETENTION
)
BY_NAME: Mapping[str, Setting] = MappingProxyType({setting.name: setting for setting in TABLE})


def load_settings(
    *,
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    file: str | None = None,
) -> Settings:
    """The settings in force, or SettingInvalid with everything that is wrong with them.

    `flags` are keyed by setting name. `file` is the settings file; when it is None the
    environment may name one in MILLSTREAM_CONFIG.
    """
    problems: list[Problem] = []
    texts = {setting.name: setting.default for setting in TABLE}
    origins = dict.fromkeys(texts, "default")

    file = file or environment.get(ENVIRONMENT_CONFIG)
    if file:
        in_file, problems = read_settings_file(file, environment)
        for name, text in in_file.items():
            if name in BY_NAME:
                texts[name], origins[name] = text, f"file {file}"
            else:
                right = _did_you_mean(name, BY_NAME) or "see `mill config show` for all settings"
                problems.append(Problem(name, text, f"file {file}", "is not a setting", right))
    for setting in TABLE:
        if setting.variable in environment:
            texts[setting.name] = environment[setting.variable]
            origins[setting.name] = f"environment {setting.variable}"
        if setting.name in flags:
            texts[setting.name] = flags[setting.name]
            origins[setting.name] = f"flag {setting.flag}"

    values: dict[str, Any] = {}
    for setting in TABLE:
        text = texts[setting.name].strip()
        try:
            values[setting.attribute] = setting.kind.parse(text)
        except ValueError as error:
            right = f"use {setting.kind.expects}"
            problems.append(Problem(setting.name, text, origins[setting.name], str(error), right))

    problems += _cross_check(values, texts, origins)
    if problems:
        raise _invalid(problems)
    return Settings(
        **values,
        origins=MappingProxyType(origins),
        warnings=tuple(_unknown_variables(environment)),
    )


def settings_in_force(settings: Settings) -> list[tuple[Setting, str, str]]:
    """Every row of the table with its value, as a user would write it, and where it came from."""
    return [
        (
            setting,
            setting.kind.show(getattr(settings, setting.attribute)),
            settings.origins[setting.name],
        )
        for setting in TABLE
    ]


# What must hold between settings: the one that is blamed, those that must have parsed, whether
# they agree, why not, and what would be right.
_Check = tuple[
    str,
    tuple[str, ...],
    Callable[[Mapping[str, Any]], bool],
    str,
    Callable[[Mapping[str, Any]], str],
]
_ADDRESSES = ("http", "grpc", "kafka", "kafka_tls", "metrics")


def _apart(name: str, other: str) -> _Check:
    def agree(values: Mapping[str, Any]) -> bool:
        one, two = values[name], values[other]
        return one is None or two is None or not one.clashes_with(two)

    more = ": HTTP answers /metrics as well" if (name, other) == ("metrics", "http") else ""
    right = f"use another port, or `off`{more}"
    return (name, (name, other), agree, f"is where {other} listens too", lambda _: right)


def _reachable(name: str) -> _Check:
    return (
        name,
        (name,),
        lambda v: v[name] is None or not v[name].is_everywhere,
        "is no address that a client could go to",
        lambda _: "use a name or an address of this machine that clients reach",
    )


_CHECKS: tuple[_Check, ...] = (
    (
        "message_bytes_max",
        ("message_bytes_max", "body_bytes_max"),
        lambda v: v["message_bytes_max"] <= v["body_bytes_max"],
        "is larger than the largest body, which a batch of one message must fit into",
        lambda v: f"use at most body_bytes_max, {show_size(v['body_bytes_max'])}",
    ),
    (
        "topic_partitions",
        ("topic_partitions", "topic_partitions_max"),
        lambda v: v["topic_partitions"] <= v["topic_partitions_max"],
        "is more than a topic may have",
        lambda v: f"use at most topic_partitions_max, {v['topic_partitions_max']}",
    ),
    (
        "group_heartbeat_interval",
        ("group_heartbeat_interval_ms", "group_session_timeout_ms"),
        lambda v: v["group_heartbeat_interval_ms"] * 2 <= v["group_session_timeout_ms"],
        "is more than half of a session, so one late heartbeat would end it",
        lambda v: f"use at most half of {show_duration(v['group_session_timeout_ms'])}",
    ),
    (
        "segment_bytes",
        ("segment_bytes", "batch_bytes_max"),
        lambda v: v["segment_bytes"] >= v["batch_bytes_max"],
        "is smaller than the largest batch, which must fit into one file",
        lambda v: f"use at least batch_bytes_max, {show_size(v['batch_bytes_max'])}",
    ),
    (
        "kafka_request_bytes_max",
        ("kafka_request_bytes_max", "batch_bytes_max", "message_bytes_max"),
        lambda v: v["kafka_request_bytes_max"] >= largest_produce(v),
        "is smaller than a request with the largest batch, which no client could send",
        lambda v: f"use at least {show_size(largest_produce(v))}",
    ),
    (
        "index_interval_bytes",
        ("index_interval_bytes", "segment_bytes"),
        lambda v: v["index_interval_bytes"] <= v["segment_bytes"],
        "is larger than a segment, so no index would have an entry",
        lambda v: f"use at most segment_bytes, {show_size(v['segment_bytes'])}",
    ),
    (
        "journal_bytes",
        ("journal_bytes", "batch_bytes_max"),
        lambda v: v["journal_bytes"] >= v["batch_bytes_max"],
        "is smaller than the largest batch, so one append could ask for a checkpoint",
        lambda v: f"use at least batch_bytes_max, {show_size(v['batch_bytes_max'])}",
    ),
    (
        "retention_bytes",
        ("retention_bytes", "segment_bytes"),
        lambda v: v["retention_bytes"] is None or v["retention_bytes"] >= v["segment_bytes"],
        "is smaller than a segment, and only whole segments are removed",
        lambda v: f"use at least segment_bytes, {show_size(v['segment_bytes'])}, or `unlimited`",
    ),
    (
        "retention_check_interval",
        ("retention_check_interval_ms", "retention_age_ms"),
        lambda v: (
            v["retention_age_ms"] is None
            or v["retention_check_interval_ms"] <= v["retention_age_ms"]
        ),
        "is longer than records are kept, so they would stay much too long",
        lambda v: f"use at most retention_age, {show_duration(v['retention_age_ms'])}",
    ),
    (
        "tls_cert",
        ("tls_cert", "tls_key"),
        lambda v: v["tls_cert"] is not None or v["tls_key"] is None,
        "is missing while tls_key is set",
        lambda _: "use both, or none",
    ),
    (
        "tls_key",
        ("tls_cert", "tls_key"),
        lambda v: v["tls_key"] is not None or v["tls_cert"] is None,
        "is missing while tls_cert is set",
        lambda _: "use both, or none",
    ),
    (
        "kafka_tls",
        ("kafka_tls", "tls_cert", "tls_key"),
        lambda v: v["kafka_tls"] is None or v["tls_cert"] is not None or v["tls_key"] is not None,
        "needs a certificate, and there is none",
        lambda _: "set tls_cert and tls_key too, or use `off`",
    ),
    (
        "kafka_tls_advertised",
        ("kafka_tls_advertised", "kafka_tls"),
        lambda v: v["kafka_tls_advertised"] is None or v["kafka_tls"] is not None,
        "is for clients of kafka_tls, which is `off`",
        lambda _: "set kafka_tls too; what `kafka` tells its clients is kafka_advertised",
    ),
    *(_reachable(name) for name in ("kafka_advertised", "kafka_tls_advertised")),
    *(_apart(name, other) for other, name in combinations(_ADDRESSES, 2)),
)


def _cross_check(
    values: Mapping[str, Any], texts: Mapping[str, str], origins: Mapping[str, str]
) -> list[Problem]:
    """Checks between settings; one whose values did not parse is skipped, it is reported anyway."""
    return [
        Problem(name, texts[name].strip(), origins[name], why, right(values))
        for name, needed, agree, why, right in _CHECKS
        if all(attribute in values for attribute in needed) and not agree(values)
    ]


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning each. Not an error: an orchestrator may set variables named for our service."""
    known = {setting.variable: setting for setting in TABLE}
    return [
        f"the environment variable {name} is not a setting"
        + (f"; {hint}" if (hint := _did_you_mean(name, known)) else "")
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIX)
        and name not in known
        and name not in ENVIRONMENT_OTHERS
    ]


def _did_you_mean(name: str, known: Mapping[str, Setting]) -> str | None:
    # Without the prefix, which would make every variable look like every other.
    bare = {one.removeprefix(ENVIRONMENT_PREFIX): one for one in known}
    wanted = name.replace("-", "_").removeprefix(ENVIRONMENT_PREFIX)
    close = difflib.get_close_matches(wanted, bare, n=1)
    return f"did you mean {bare[close[0]]}?" if close else None


def _invalid(problems: list[Problem]) -> SettingInvalid:
    count = "one setting" if len(problems) == 1 else f"{len(problems)} settings"
    lines = "\n".join(f"  {problem}" for problem in problems)
    return SettingInvalid(
        f"{count} cannot be used:\n{lines}",
        setting=problems[0].setting,
        value=problems[0].value,
        problems=tuple(problems),
    )


# The two must name the same attributes; a wrong row fails at import, not at a user's start.
assert {row.attribute for row in TABLE} == {f.name for f in fields(Settings)} - {
    "origins",
    "warnings",
}
