"""Bodies of requests as typed values, and values as bodies of answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from millstream.errors import BodyInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.parameters import Parameters

Form = TypeVar("Form")

NO_CONTENT = Answer(204)
# How much one page of a list has, unless a client asks for less.
LISTED_MAX = 10_000
LISTED_PARAMETERS = frozenset(("after", "limit"))
# What the text of a body may be wrong in: JSON, nesting that is too deep, and UTF-8, which the
# decoder does not look at in what it leaves as it is.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_PATH_OF_MESSAGE = re.compile(r" - at `\$\.messages\[([0-9]+)\]")


def read_body(decoder: msgspec.json.Decoder[Form], body: bytes, form: str) -> Form:
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except UNREADABLE as error:
        if isinstance(error, msgspec.ValidationError) and (b"." in body or b"e" in body.lower()):
            try:
                return msgspec.convert(whole_numbers(msgspec.json.decode(body)), decoder.type)
            except UNREADABLE:
                pass
        raise BodyInvalid(
            f"the body must be JSON of the form {form}: {reason(error, body)}", **record_of(error)
        ) from error


def reason(error: Exception, text: bytes) -> str:
    """What is wrong with it: the decoder's own words, where they say it."""
    said = str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # The decoder reads what follows as the other half, and says what is wrong with that.
    is_half = re.search("truncated|escape", said) and _HALF_PAIR.search(text)
    if "surrogate" in said or is_half:
        return "a text in it has half of a surrogate pair, such as \\ud800, which is no character"
    return said


def record_of(error: Exception) -> dict[str, int]:
    """Of a body of many messages, the index of the one that is wrong: the decoder says its path."""
    found = _PATH_OF_MESSAGE.search(str(error))
    return {"record": int(found[1])} if found else {}


def whole_numbers(value: object) -> object:
    """JSON has one kind of number: 2.0 is a whole one, and some languages write it so."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: whole_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [whole_numbers(one) for one in value]
    return value


def json_of(page: object, status: int = 200) -> Answer:
    return Answer(status, msgspec.json.encode(page))


def page_of(names: Sequence[str], parameters: Parameters) -> tuple[list[str], str | None]:
    """A part of a sorted list, and the name to go on after, when there is more."""
    after = parameters.text("after", "")
    limit = parameters.whole("limit", LISTED_MAX, 1, LISTED_MAX)
    found = [name for name in names if name > after]
    return found[:limit], found[limit - 1] if len(found) > limit else None
