"""What a Millstream broker says over HTTP: where its Kafka listener and its data are, and which
segment files a topic has."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from millstream.errors import BrokerUnreachable, MillstreamError
from millstream.spark.options import BrokerPlace
from millstream.wire.refusals import refusal

ANSWER_S = 30.0
# Of a topic with as many segments as a broker may have.
ANSWER_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SegmentFile:
    name: str
    base_offset: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The files of one partition, in order. They may be read up to the high watermark."""

    directory: str
    uuid: str
    start_offset: int
    high_watermark: int
    segments: tuple[SegmentFile, ...]


def cluster_facts(place: BrokerPlace) -> dict[str, Any]:
    return _get(place, "/v1/admin/cluster")


def kafka_addresses(place: BrokerPlace) -> tuple[str, ...]:
    """Where the Kafka listeners of the cluster at an HTTP address are."""
    nodes = cluster_facts(place).get("nodes", [])
    addresses = tuple(str(node["kafka"]) for node in nodes if node.get("kafka"))
    if not addresses:
        raise BrokerUnreachable(
            f"the broker at {place.url} has no Kafka listener, which Spark reads through; start it "
            "with `mill serve --kafka 127.0.0.1:9092`",
            server=place.url,
        )
    return addresses


def files_of(place: BrokerPlace, topic: str, numbers: list[int]) -> dict[int, PartFiles]:
    """By partition."""
    asked = urlencode([("partition", number) for number in numbers])
    page = _get(place, f"/v1/topics/{quote(topic)}/manifest?{asked}")
    return {
        one["partition"]: PartFiles(
            directory=f"{page['directory']}/{one['partition']}",
            uuid=str(page["uuid"]).replace("-", ""),
            start_offset=one["start_offset"],
            high_watermark=one["high_watermark"],
            segments=tuple(
                SegmentFile(
                    segment.get("file") or f"{segment['base_offset']:020d}.log",
                    segment["base_offset"],
                    segment["sealed"],
                )
                for segment in one["segments"]
            ),
        )
        for one in page["partitions"]
    }


def _get(place: BrokerPlace, path: str) -> dict[str, Any]:
    assert place.url is not None
    context = None
    if place.url.startswith("https:"):
        context = ssl.create_default_context()
        if place.ca is not None:
            context.load_verify_locations(place.ca)
    try:
        # The URL was checked to be http or https when the options were read.
        with urllib.request.urlopen(  # noqa: S310
            place.url + path, timeout=ANSWER_S, context=context
        ) as answer:
            page: dict[str, Any] = json.loads(answer.read(ANSWER_BYTES_MAX))
            return page
    except urllib.error.HTTPError as error:
        raise refusal(place.url, error.code, error.read(ANSWER_BYTES_MAX)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _unreachable(place.url, error) from error


def _unreachable(url: str, error: Exception) -> MillstreamError:
    reason = getattr(error, "reason", None) or error
    return BrokerUnreachable(f"no broker answers at {url}: {reason}", server=url)
