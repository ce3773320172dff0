"""How often Python looks for garbage that reference counts do not free.

An append makes a handful of objects that live until it is in its segment, so by default the
collector goes through them again and again: a tenth of the time of an append. And now and then it
goes through all objects there are, which takes tens of milliseconds once there are a thousand
partitions. Nothing on the way of a record makes cycles, so it may look much less often.
"""

from __future__ import annotations

import gc

# Objects that were made and not freed, before it looks at the young ones; and how many such looks
# come before one at the middle-aged, and at the old: as many as by default. At some hundred bytes
# each, a few megabytes of young ones wait to be found. Of those that were old when they came loose
# two million may wait, so what ends after a long time, as a connection does, should leave no cycle.
THRESHOLDS = (20_000, 10, 10)


def calm_collector() -> None:
    """For a process that is an engine's: call it once, when all that stays has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
