"""What a Millstream broker says over HTTP: where its Kafka listener and its data are, and which
segment files a topic has.

One question is one try, and says by `Away` that another may help; who has nothing else to go by
asks `patiently`.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from millstream.errors import BrokerUnreachable
from millstream.spark.options import BrokerPlace
from millstream.spark.patience import Patience
from millstream.wire.refusals import refusal

Result = TypeVar("Result")

ANSWER_S = 30.0
# What a broker that is too busy says, and what a proxy says for one that is away.
_LATER = frozenset((429, 502, 503, 504))
# Of a topic with as many segments as a broker may have.
ANSWER_BYTES_MAX = 64 * 2**20


class Away(BrokerUnreachable):
    """No broker answers, or it said to come back."""


def patiently(
    place: BrokerPlace,
    call: Callable[[], Result],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """The call's result, tried again while the broker is away."""
    patience = Patience(place.patience_s, clock, sleep)
    while True:
        try:
            return call()
        except Away as error:
            if not patience.pause(error.message):
                raise Away(
                    f"{error.message}; it was tried for {place.patience_s:g} s (the option "
                    "kafkaConsumer.pollTimeoutMs)",
                    server=place.url,
                ) from error


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


def kafka_addresses(
    place: BrokerPlace,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """Where the Kafka listeners of the cluster at an HTTP address are."""
    facts = patiently(place, lambda: cluster_facts(place), clock=clock, sleep=sleep)
    nodes = facts.get("nodes", [])
    # A broker may have an address with TLS beside the plain one.
    names = ("kafka_tls", "kafka") if place.uses_tls else ("kafka",)
    found = [next((node[name] for name in names if node.get(name)), None) for node in nodes]
    addresses = tuple(str(one) for one in found if one is not None)
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
        if error.code in _LATER:
            raise _away(place.url, f"it said {error.code}") from error
        raise refusal(place.url, error.code, error.read(ANSWER_BYTES_MAX)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            # That does not pass.
            raise BrokerUnreachable(
                f"the certificate of {place.url} is not trusted: {reason.verify_message}; name who "
                "signed it with the option ca",
                server=place.url,
            ) from error
        raise _away(place.url, str(reason)) from error


def _away(url: str, why: str) -> Away:
    return Away(f"{_nobody(url)}: {why}", server=url)


def _nobody(url: str) -> str:
    return f"no broker answers at {url}"
