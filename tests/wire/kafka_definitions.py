"""Kafka's own definitions of its messages, for those that kafka-python's package leaves out: a
second codec beside kio. They are in the jar of Kafka's client, which is taken from where
`make kafka-peer` puts it; no package on PyPI brings them."""

from __future__ import annotations

import importlib
import sys
import types
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from bench.kafka_peer import jars
from kafka.protocol.api_message import ApiMessage

PACKAGE = "millstream_tests_kafka_definitions"
FOLDER = "common/message/"


def definition(name: str) -> Any:
    """kafka-python's class of the message; skips the test where there is no jar."""
    package = _package()
    if package is None:
        pytest.skip("Kafka's jars are missing: set KAFKA_HOME, or run `make kafka-peer`")
    return _definition(name)


@cache
def _definition(name: str) -> Any:
    return types.new_class(name, (ApiMessage,), {"load_json": PACKAGE})


@cache
def _package() -> types.ModuleType | None:
    """The definitions as a package, which is how kafka-python wants them."""
    library = jars()
    found = sorted(Path(library).parent.glob("kafka-clients-*.jar")) if library else []
    if not found:
        return None
    # Gone with the last reference, which the module keeps.
    folder = TemporaryDirectory()
    package = Path(folder.name, PACKAGE)
    package.mkdir()
    (package / "__init__.py").touch()
    with zipfile.ZipFile(found[-1]) as jar:
        for name in jar.namelist():
            if name.startswith(FOLDER) and name.endswith(".json"):
                (package / name.removeprefix(FOLDER)).write_bytes(jar.read(name))
    sys.path.insert(0, folder.name)
    try:
        module = importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(folder.name)
    module.folder = folder  # type: ignore[attr-defined]
    return module
