"""Columns that several pipelines make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

if TYPE_CHECKING:
    from pyspark.sql import Column

# Of a key or a value that is shown to people.
SHOWN_CHARACTERS = 200


def as_text(column: str) -> Column:
    """Bytes as the text that a person sees of them; what is no text is shown in base64."""
    text = sql.col(column).cast("string")
    shown = sql.substring(text, 1, SHOWN_CHARACTERS)
    coded = sql.base64(sql.substring(column, 1, SHOWN_CHARACTERS))
    return sql.when(sql.is_valid_utf8(text), shown).otherwise(coded)


def begin_s(millis: str, seconds: int) -> Column:
    """When the step of time begins that a time lies in, in seconds since 1970."""
    return sql.floor(sql.col(millis) / (1000 * seconds)) * seconds
