"""What a run that was asked to stop tells its group: where its last finished micro-batch ended.

The source itself tells it when Spark asks for the batch after, which with `--every` may be an hour
later, or in the next run only.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping

from millstream.errors import MillstreamError
from millstream.spark.driver import Driver
from millstream.spark.positions import Part, Position
from millstream.spark.source_options import read_source_options

logger = logging.getLogger("millstream.spark")

# Who stops a run does not wait long for it.
PATIENCE_MS = 3000


def commit_finished(
    where: Mapping[str, str], group: str, topics: Collection[str], ends: Iterable[str]
) -> None:
    """`ends` are the positions at which finished micro-batches ended, as progress has them, of all
    sources of the run. The group may stay behind, but is never ahead of any of them."""
    position = least(map(_position, ends), topics)
    if not position.offsets:
        return
    given = {
        **where,
        "subscribe": ",".join(position.topics()),
        "groupId": group,
        "kafkaConsumer.pollTimeoutMs": str(PATIENCE_MS),
    }
    driver = Driver(read_source_options(given, os.environ, is_stream=None))
    try:
        driver.latest(position)
        driver.commit(position)
    except MillstreamError as error:
        logger.warning("offsets of the group %s: %s", group, error.message)
    finally:
        driver.close()


def least(positions: Iterable[Position], topics: Collection[str]) -> Position:
    """Of these topics, up to where all sources that read them are. A topic that is not the same one
    for all, or has a partition that one of them does not know yet, is left out."""
    found: dict[str, dict[Part, int]] = {}
    ids: dict[str, str | None] = {}
    torn = set()
    for position in positions:
        for topic in set(position.topics()) & set(topics):
            offsets = {part: at for part, at in position.offsets.items() if part[0] == topic}
            id = position.ids.get(topic)
            before = found.setdefault(topic, offsets)
            if ids.setdefault(topic, id) != id or before.keys() != offsets.keys():
                torn.add(topic)
                continue
            found[topic] = {part: min(at, before[part]) for part, at in offsets.items()}
    kept = [topic for topic in found if topic not in torn]
    return Position(
        {part: at for topic in kept for part, at in found[topic].items()},
        {topic: id for topic in kept if (id := ids[topic]) is not None},
    )


def _position(told: str) -> Position:
    """Nothing of what is not a source of Millstream's."""
    try:
        page = json.loads(told)
    except ValueError:
        return Position()
    is_ours = isinstance(page, dict) and all(isinstance(one, dict) for one in page.values())
    return Position.from_json(page) if is_ours else Position()
