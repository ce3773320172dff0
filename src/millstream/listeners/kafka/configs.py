"""Topic settings by the names that Kafka has for them: one table, both ways.

What Kafka has and a topic of ours cannot change is in a second table, with the one value that it
has here: tools want to see every config there is. Settings that Kafka does not have are there too,
as `millstream.<name>`, so its tools show and change all of a topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.topic_settings import TABLE, UNLIMITED
from millstream.errors import TopicSettingInvalid
from millstream.kinds import Duration, Size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from millstream.broker.topic_settings import TopicSettings
    from millstream.broker.topics import Topic
    from millstream.config import Setting

OWN_PREFIX = "millstream."
HTTP = OWN_PREFIX + "http"

# Of Kafka: what a value is.
BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7
# And where it comes from.
OF_TOPIC, OF_BROKER, DEFAULT = 1, 4, 5

# What a record may say, and what we call it.
_TIMESTAMPS = {"CreateTime": "create", "LogAppendTime": "append"}
_POLICIES = {"delete": False, "compact": True}
NO_LIMIT = "-1"


class Config(NamedTuple):
    """One config as it is shown."""

    name: str
    value: str
    kind: int
    source: int
    is_read_only: bool
    about: str

    @property
    def is_default(self) -> bool:
        return self.source == DEFAULT


class _Row(NamedTuple):
    """One of Kafka's names for one of our settings."""

    name: str
    setting: str
    kind: int
    # From Kafka's text to what our table takes, and from what is in force to Kafka's text.
    read: Callable[[str], object]
    show: Callable[[object], str]


def _read_number(kind: Size | Duration) -> Callable[[str], object]:
    """Bounds are looked at here: our table has them in words that Kafka's configs do not take."""
    if isinstance(kind, Size):
        least, most, has_no_limit = kind.minimum, kind.maximum, kind.unlimited
    else:
        least, most, has_no_limit = kind.minimum_ms, kind.maximum_ms, kind.otherwise == UNLIMITED
    right = f"a whole number from {least} to {most}"
    if has_no_limit:
        right += f", or {NO_LIMIT} for no limit"

    def read(text: str) -> object:
        if has_no_limit and text.strip() == NO_LIMIT:
            return UNLIMITED
        try:
            number = int(text)
        except ValueError:
            raise _invalid(text, right) from None
        if not least <= number <= most:
            raise _invalid(text, right)
        return number

    return read


def _show_number(value: object) -> str:
    return NO_LIMIT if value is None else str(value)


def _read_word(words: Mapping[str, object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text.strip() not in words:
            raise _invalid(text, "one of " + ", ".join(words))
        return words[text.strip()]

    return read


def _show_word(words: Mapping[str, object]) -> Callable[[object], str]:
    return {value: word for word, value in words.items()}.__getitem__


def _number(name: str, setting: str, kind: int) -> _Row:
    ours = _KINDS[setting]
    assert isinstance(ours, Size | Duration), setting
    return _Row(name, setting, kind, _read_number(ours), _show_number)


_KINDS = {row.name: row.kind for row in TABLE}
LARGEST_BATCH = "max.message.bytes"
_ROWS = (
    _Row("cleanup.policy", "compact", LIST, _read_word(_POLICIES), _show_word(_POLICIES)),
    _number("delete.retention.ms", "tombstone_retention_ms", LONG),
    _number(LARGEST_BATCH, "message_bytes_max", INT),
    _Row(
        "message.timestamp.type",
        "timestamps",
        STRING,
        _read_word(_TIMESTAMPS),
        _show_word(_TIMESTAMPS),
    ),
    _number("retention.bytes", "retention_bytes", LONG),
    _number("retention.ms", "retention_ms", LONG),
    _number("segment.bytes", "segment_bytes", INT),
    _number("segment.ms", "segment_ms", LONG),
)
_BY_NAME = {row.name: row for row in _ROWS}
_IN_KAFKA = {row.setting for row in _ROWS}
_OWN = {OWN_PREFIX + row.name: row for row in TABLE if row.name not in _IN_KAFKA}
_ABOUT = {row.name: row.causes for row in TABLE}

# What every topic of ours has, and none can change.
_FIXED = {
    "compression.type": ("producer", STRING),
    "file.delete.delay.ms": ("60000", LONG),
    "flush.messages": ("9223372036854775807", LONG),
    "flush.ms": ("9223372036854775807", LONG),
    "follower.replication.throttled.replicas": ("", LIST),
    "index.interval.bytes": ("4096", INT),
    "leader.replication.throttled.replicas": ("", LIST),
    "local.retention.bytes": ("-2", LONG),
    "local.retention.ms": ("-2", LONG),
    "max.compaction.lag.ms": ("9223372036854775807", LONG),
    "message.downconversion.enable": ("false", BOOLEAN),
    "message.timestamp.after.max.ms": ("9223372036854775807", LONG),
    "message.timestamp.before.max.ms": ("9223372036854775807", LONG),
    "min.cleanable.dirty.ratio": ("0.5", DOUBLE),
    "min.compaction.lag.ms": ("0", LONG),
    "min.insync.replicas": ("1", INT),
    "preallocate": ("false", BOOLEAN),
    "remote.storage.enable": ("false", BOOLEAN),
    "segment.index.bytes": ("10485760", INT),
    "segment.jitter.ms": ("0", LONG),
    "unclean.leader.election.enable": ("false", BOOLEAN),
}
# Kafka's compacts it.
_INTERNAL = {**_FIXED, "cleanup.policy": ("compact", LIST)}


def read_configs(configs: Mapping[str, str | None]) -> dict[str, object]:
    """Settings as our table takes them; None goes back to the default. TopicSettingInvalid for a
    config that there is not, and for another value of one that is always the same."""
    settings: dict[str, object] = {}
    for name, text in configs.items():
        own, row = _OWN.get(name), _BY_NAME.get(name)
        if own is not None:
            settings[own.name] = text
        elif row is not None:
            try:
                settings[row.setting] = None if text is None else row.read(text)
            except TopicSettingInvalid as error:
                raise TopicSettingInvalid(
                    f"the config {name} {error.message}", setting=name, value=text
                ) from None
        elif name not in _FIXED:
            raise TopicSettingInvalid(
                f"topics have no config {name!r}; describe one to see what they have",
                setting=name,
                value=text,
            )
        elif text is not None and text.strip() != _FIXED[name][0]:
            raise TopicSettingInvalid(
                f"the config {name} is always {_FIXED[name][0]!r} here", setting=name, value=text
            )
    return settings


def describe(topic: Topic, batch_bytes_max: int) -> list[Config]:
    """Every config of a topic, by name. The largest batch is one of its configs in Kafka; where it
    is not set for the topic, it is what the broker takes."""
    found = [_shown(row.name, row.setting, row.kind, row.show, topic) for row in _ROWS]
    if "message_bytes_max" not in topic.given:
        found = [
            one._replace(value=str(batch_bytes_max)) if one.name == LARGEST_BATCH else one
            for one in found
        ]
    for name, own in _OWN.items():
        found.append(_shown(name, own.name, STRING, own.kind.show, topic))
    found += [
        Config(name, value, kind, DEFAULT, True, "Always the same in this broker.")
        for name, (value, kind) in _FIXED.items()
    ]
    return sorted(found)


def describe_internal() -> list[Config]:
    """Of a topic that only looks like one of Kafka's: nothing in it can be changed."""
    return [
        Config(name, value, kind, DEFAULT, True, "Always the same in this broker.")
        for name, (value, kind) in sorted(_INTERNAL.items())
    ]


def set_for(topic: Topic) -> set[str]:
    """The configs that were set for the topic itself."""
    names = {setting: name for name, setting, *_ in _ROWS}
    return {names.get(setting, OWN_PREFIX + setting) for setting in topic.given}


def _shown(
    name: str, setting: str, kind: int, show: Callable[[object], str], topic: Topic
) -> Config:
    settings: TopicSettings = topic.settings
    source = OF_TOPIC if setting in topic.given else DEFAULT
    value = show(getattr(settings, setting))
    return Config(name, value, kind, source, False, _ABOUT[setting])


def _invalid(text: str, right: str) -> TopicSettingInvalid:
    return TopicSettingInvalid(f"cannot be {text!r}; use {right}")


# Kafka's names for what a broker has, and our settings for the same.
_OF_BROKER = {
    "auto.create.topics.enable": ("topic_auto_create", BOOLEAN),
    "broker.id": ("node_id", INT),
    "log.retention.bytes": ("retention_bytes", LONG),
    "log.retention.ms": ("retention_age", LONG),
    "log.segment.bytes": ("segment_bytes", INT),
    "message.max.bytes": ("batch_bytes_max", INT),
    "node.id": ("node_id", INT),
    "num.partitions": ("topic_partitions", INT),
    "socket.request.max.bytes": ("kafka_request_bytes_max", INT),
}


def broker_configs(in_force: Iterable[tuple[Setting, object, str]]) -> list[Config]:
    """Every setting of the broker, each with its value and where that came from."""
    found: list[Config] = []
    values: dict[str, object] = {}
    sources: dict[str, int] = {}
    for setting, value, origin in in_force:
        source = DEFAULT if origin == "default" else OF_BROKER
        values[setting.name], sources[setting.name] = value, source
        shown = setting.kind.show(value)
        found.append(Config(OWN_PREFIX + setting.name, shown, STRING, source, True, setting.causes))
    for name, (ours, kind) in _OF_BROKER.items():
        value = values[ours]
        shown = str(value == "on").lower() if kind == BOOLEAN else _show_number(value)
        found.append(Config(name, shown, kind, sources[ours], True, f"The setting {ours}."))
    found.append(_advertised(values, sources))
    return sorted(found)


def with_http(configs: Iterable[Config], url: str | None) -> list[Config]:
    """The setting `http` as the URL by which a client finds it; without it, where there is none.
    So a client of Kafka's protocol learns that this is a broker of ours, and where the rest is."""
    return [
        one if one.name != HTTP else one._replace(value=url or "")
        for one in configs
        if one.name != HTTP or url is not None
    ]


def _advertised(values: Mapping[str, object], sources: Mapping[str, int]) -> Config:
    """Where clients are told to come to. Kafka's tools take it for one that could be changed while
    the broker runs; who tries is refused as for all others."""
    is_plain = not values.get("tls_cert") or values.get("kafka_tls") is not None
    protocols = {"kafka": "PLAINTEXT" if is_plain else "SSL", "kafka_tls": "SSL"}
    places = {one: values.get(f"{one}_advertised") or values.get(one) for one in protocols}
    shown = ",".join(
        f"{protocols[name]}://{place}" for name, place in places.items() if place is not None
    )
    about = "The settings kafka_advertised and kafka_tls_advertised, or kafka and kafka_tls."
    is_set = OF_BROKER in (sources["kafka_advertised"], sources["kafka_tls_advertised"])
    source = OF_BROKER if is_set else DEFAULT
    return Config("advertised.listeners", shown, LIST, source, False, about)
