"""Kafka's messages as kio has them, of any version: a codec that shares nothing with ours."""

from __future__ import annotations

import dataclasses
import importlib
import io
from typing import Any

from kio.serial import entity_reader, entity_writer


def request(api: str, version: int, fields: dict[str, Any]) -> bytes:
    """Of the fields those that the version has; it must have all that it needs."""
    schema = importlib.import_module(f"kio.schema.{api}.v{version}.request")
    message = _made(schema, f"{_camel(api)}Request", fields)
    buffer = io.BytesIO()
    entity_writer(type(message))(buffer, message)
    return buffer.getvalue()


def response(api: str, version: int, data: bytes) -> Any:
    """All bytes must be read."""
    schema = importlib.import_module(f"kio.schema.{api}.v{version}.response")
    message, size = entity_reader(getattr(schema, f"{_camel(api)}Response"))(data, 0)
    assert size == len(data)
    return message


def _made(schema: Any, name: str, fields: dict[str, Any]) -> Any:
    """A list of (name of the class, fields) becomes a tuple of those."""
    kind = getattr(schema, name)
    known = {one.name for one in dataclasses.fields(kind)}
    return kind(**{key: _value(schema, one) for key, one in fields.items() if key in known})


def _value(schema: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_made(schema, *one) for one in value)
    return value


def _camel(api: str) -> str:
    return "".join(part.capitalize() for part in api.split("_"))
