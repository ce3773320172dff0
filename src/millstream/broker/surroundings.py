"""What the parts that know of groups have around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.engine.pending import Pending

if TYPE_CHECKING:
    from millstream.broker.reading import Reader
    from millstream.broker.timers import Timers
    from millstream.broker.topics import Topics
    from millstream.broker.views import Views
    from millstream.clock import Clock
    from millstream.engine.turns import Turns


@dataclass(frozen=True, slots=True)
class Surroundings:
    views: Views
    topics: Topics
    reader: Reader
    clock: Clock
    timers: Timers
    turns: Turns

    def breath(self) -> Pending[None]:
        """Done in the next turn: others have theirs first."""
        pending: Pending[None] = Pending()
        self.turns.soon(lambda: pending.succeed(None))
        return pending
