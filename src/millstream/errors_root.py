"""The root of the tree of errors, on which every file of it builds; `errors.py` has all of it."""

from __future__ import annotations

from typing import ClassVar


class MillstreamError(Exception):
    """The root. Subclasses set `code` and `retriable`; `fields` go out with the message."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
