"""Everything that consumes, made together: offsets, groups, lag, sequential consumers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.broker.classic_groups import ClassicGroups, ClassicOptions
from millstream.broker.consumer_groups import ConsumerGroups
from millstream.broker.directory import Directory
from millstream.broker.group_offsets import GroupOffsets
from millstream.broker.groups import Groups
from millstream.broker.joining import GroupOptions
from millstream.broker.lag import Lags
from millstream.broker.sequential import Sequential
from millstream.broker.share_groups import ShareGroups
from millstream.engine.pending import Pending, follow

if TYPE_CHECKING:
    from millstream.broker.surroundings import Surroundings

DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class ConsumingOptions:
    """As the settings have it; None keeps offsets for ever."""

    group: GroupOptions = field(default_factory=GroupOptions)
    classic: ClassicOptions = field(default_factory=ClassicOptions)
    offsets_retention_ms: int | None = 7 * DAY_MS
    consumers_max: int = 100_000


@dataclass(slots=True)
class Consuming:
    group_offsets: GroupOffsets
    consumer_offsets: GroupOffsets
    groups: Groups
    classic_groups: ClassicGroups
    consumer_groups: ConsumerGroups
    share_groups: ShareGroups
    directory: Directory
    lags: Lags
    sequential: Sequential

    def start(self) -> Pending[None]:
        """After views and topics are loaded, before listeners open."""
        return follow(self._start())

    def _start(self) -> Generator[Pending[Any], Any, None]:
        yield self.group_offsets.start()
        yield self.consumer_offsets.start()
        self.lags.start()

    def stop(self) -> None:
        """Before the engine: polls that wait are answered, and what is handled is committed."""
        self.groups.drain()
        self.classic_groups.drain()
        self.groups.commit_handled()
        self.lags.stop()
        self.group_offsets.stop()
        self.consumer_offsets.stop()


def make_consuming(
    around: Surroundings, options: ConsumingOptions, random_hex: Callable[[int], str]
) -> Consuming:
    """Before the views are loaded. `random_hex` is `secrets.token_hex`, or a test's own."""
    offsets = GroupOffsets(around, options.offsets_retention_ms)
    consumer_offsets = GroupOffsets(around, options.offsets_retention_ms, "consumers")
    groups = Groups(around, offsets, options.group, random_hex)
    check_new = groups.check_new
    classic = ClassicGroups(around, offsets, options.classic, random_hex, check_new)
    shares = ShareGroups(around, offsets, options.group, check_new)
    directory = Directory(offsets, groups, classic, shares, options.group.assignor)
    return Consuming(
        group_offsets=offsets,
        consumer_offsets=consumer_offsets,
        groups=groups,
        classic_groups=classic,
        consumer_groups=ConsumerGroups(around, offsets, options.group, groups, random_hex),
        share_groups=shares,
        directory=directory,
        lags=Lags(around, offsets, directory),
        sequential=Sequential(around, consumer_offsets, options.consumers_max, random_hex),
    )
