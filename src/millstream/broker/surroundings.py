"""What the parts that know of groups have around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.broker.reading import Reader
    from millstream.broker.timers import Timers
    from millstream.broker.topics import Topics
    from millstream.broker.turns import Turns
    from millstream.broker.views import Views
    from millstream.clock import Clock


@dataclass(frozen=True, slots=True)
class Surroundings:
    views: Views
    topics: Topics
    reader: Reader
    clock: Clock
    timers: Timers
    turns: Turns
