"""Answers that come later, made from what the broker answers later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from millstream.engine.pending import Pending

if TYPE_CHECKING:
    from millstream.listeners.http.answer import Answer

T = TypeVar("T")


class Later(NamedTuple):
    """A result that is not there yet, and what makes an answer of it.

    It is a pair and no `Pending` of its own: on a hot route that would be a tenth of the work.
    """

    pending: Pending[Any]
    make: Callable[[Any], Answer]


def later(pending: Pending[T], make: Callable[[T], Answer]) -> Later:
    """What `make` makes of a result, when it is there. An error stays an error."""
    return Later(pending, make)
