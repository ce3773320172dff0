"""What there is, and where: the broker's addresses, and the files of a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import millstream
from millstream import errors
from millstream.kinds import Address
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import json_of
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.parameters import PARTITION_MAX, Parameters, whole
from millstream.listeners.http.route import JSON_MEDIA, Form, Parameter, Reply
from millstream.listeners.http.schemas import (
    BOOLEAN,
    NUMBER,
    OFFSET,
    PARTITION,
    TOPIC_IN_PATH,
    array,
    nullable,
    shown,
    text,
)
from millstream.listeners.http.schemas import whole as number
from millstream.wire.places import Place

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.broker.manifests import Manifest
    from millstream.engine.protocol import Files
    from millstream.listeners.http.route import Call
    from millstream.observe.status import Status

MANIFEST_PARAMETERS = frozenset(("partition",))

CLUSTER = Form(
    "The brokers, and what they hold",
    {
        200: Reply(
            "This broker: it stands alone. `id` is that of its data directory, and Kafka's "
            "cluster id. `http` is a URL, `kafka` an address, or null where it does not listen; "
            "`kafka_tls` is where it speaks TLS, if that is apart from `kafka`.",
            {
                JSON_MEDIA: shown(
                    "Cluster",
                    cluster=shown("ClusterFacts", id=text(), nodes=number(1), topics=number(),
                                  partitions=number()),
                    nodes=array(
                        shown("Node", node_id=number(), state=text(), version=text(),
                              uptime_seconds=NUMBER, is_leader=BOOLEAN, id=text(),
                              http=nullable(text()), kafka=nullable(text()),
                              kafka_tls=nullable(text()),
                              data_directory=text())
                    ),
                )
            },
        )
    },
)  # fmt: skip

MANIFEST = Form(
    "The segment files of a topic",
    {
        200: Reply(
            "As they are now. Files of a partition are in the folder of its number.",
            {
                JSON_MEDIA: shown(
                    "Manifest",
                    topic=text(),
                    uuid=text(),
                    directory=text(),
                    cluster_id=text(),
                    partitions=array(
                        shown(
                            "PartitionFiles",
                            partition=PARTITION,
                            start_offset=OFFSET,
                            high_watermark=OFFSET,
                            leader_epoch=number(),
                            segments=array(
                                shown("SegmentFile", file=text(), base_offset=OFFSET,
                                      bytes=number(), sealed=BOOLEAN)
                            ),
                        )
                    ),
                )
            },
        )
    },
    (
        TOPIC_IN_PATH,
        Parameter("partition", array(PARTITION), "Only these; may be given several times."),
    ),
    (),
    (
        errors.TopicUnknown,
        errors.TopicNameInvalid,
        errors.TopicReserved,
        errors.PartitionUnknown,
        errors.SegmentsUnavailable,
    ),
    "For a reader on the same machine. It reads each file up to `bytes`, and records from "
    "`start_offset` up to `high_watermark`. When a file is gone, retention or compaction took it: "
    "take a new manifest. `uuid` is that of the topic: one that was made again has another.",
)  # fmt: skip


class ClusterAnswers:
    __slots__ = ("_broker", "_status")

    def __init__(self, broker: Broker, status: Status) -> None:
        self._broker = broker
        self._status = status

    def cluster(self, call: Call) -> Answer:
        Parameters(call.query, ())
        topics, status = self._broker.topics, self._status
        where, id = status.whereabouts, self._broker.manifests.cluster_id
        http, kafka = _seen_from(call, where.http), _seen_from(call, where.kafka)
        kafka_tls = _seen_from(call, where.kafka_tls)
        facts = {
            "id": id,
            "nodes": 1,
            "topics": len(topics),
            "partitions": topics.partitions_total,
        }
        node = {
            "node_id": status.node_id,
            "state": status.phase,
            "version": millstream.__version__,
            "uptime_seconds": round(status.uptime_seconds, 3),
            "is_leader": True,
            "id": id,
            "http": None if http is None else _url_of(http, where.is_secure),
            "kafka": None if kafka is None else str(kafka),
            "kafka_tls": None if kafka_tls is None else str(kafka_tls),
            "data_directory": where.data_directory,
        }
        return json_of({"cluster": facts, "nodes": [node]})

    def manifest(self, call: Call, topic: str) -> Later:
        parameters = Parameters(call.query, MANIFEST_PARAMETERS, many=MANIFEST_PARAMETERS)
        numbers = [
            whole("partition", one, 0, PARTITION_MAX) for one in parameters.texts("partition")
        ]

        def answer(manifest: Manifest) -> Answer:
            return json_of(
                {
                    "topic": manifest.topic.name,
                    "uuid": str(manifest.topic.uuid),
                    "directory": manifest.directory,
                    "cluster_id": self._broker.manifests.cluster_id,
                    "partitions": [_files(*one) for one in manifest.partitions],
                }
            )

        return later(self._broker.manifests.of(topic, numbers), answer)


def _url_of(address: Address, is_secure: bool) -> str:
    return f"{'https' if is_secure else 'http'}://{address}"


def _seen_from(call: Call, address: Address | None) -> Address | None:
    """Who listens everywhere is where the client came to."""
    if address is None or not address.is_everywhere:
        return address
    try:
        host = Place.of("http://" + call.header(b"host").decode("latin-1")).host
    except errors.MillstreamError:
        return address
    return Address(host, address.port)


def _files(partition: int, files: Files) -> dict[str, object]:
    return {
        "partition": partition,
        "start_offset": files.start,
        "high_watermark": files.high_watermark,
        "leader_epoch": files.leader_epoch,
        "segments": [
            {
                "file": one.name,
                "base_offset": one.base_offset,
                "bytes": one.bytes,
                "sealed": one.is_sealed,
            }
            for one in files.segments
        ],
    }
