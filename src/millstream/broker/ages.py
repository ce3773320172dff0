"""How old something is that was stamped by the wall clock, which may be put forward or back.

What was stamped since the start is as old as the monotonic clock says: each time that the wall
clock was put is remembered. Of what was stamped before, the stamp is all that is known. Its age is
what it was at the start and the time since, or what the wall clock says, whichever is less: rather
too young than too old, because what is too old is forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from millstream.clock import Clock

# Clocks that differ by less drift apart; nobody has put one.
PUT_MS = 1000
# One more, and what was stamped in the oldest but the first counts as stamped before the start.
SPANS_MAX = 100


class _Span(NamedTuple):
    """From here on the two clocks ran together."""

    monotonic_ms: int
    wall_ms: int


class Ages:
    __slots__ = ("_clock", "_spans")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans = [self._now()]

    def stamp_ms(self) -> int:
        """The time on the wall clock, for what is stamped now."""
        now, last = self._now(), self._spans[-1]
        if abs(_wall_at(last, now.monotonic_ms) - now.wall_ms) >= PUT_MS:
            self._spans.append(now)
            if len(self._spans) > SPANS_MAX:
                del self._spans[1]
        return now.wall_ms

    def age_ms(self, stamp_ms: int) -> int:
        """Less than 0 for a stamp from before the start that lies ahead."""
        now = self._now()
        end_ms = now.monotonic_ms
        for span in reversed(self._spans):
            at_ms = span.monotonic_ms + stamp_ms - span.wall_ms
            if span.monotonic_ms - PUT_MS < at_ms < end_ms + PUT_MS:
                return max(0, now.monotonic_ms - at_ms)
            end_ms = span.monotonic_ms
        return min(now.wall_ms, _wall_at(self._spans[0], now.monotonic_ms)) - stamp_ms

    def _now(self) -> _Span:
        return _Span(round(self._clock.monotonic() * 1000), self._clock.wall_ms())


def _wall_at(span: _Span, monotonic_ms: int) -> int:
    """What the wall clock would say, had nobody put it since."""
    return span.wall_ms + monotonic_ms - span.monotonic_ms
