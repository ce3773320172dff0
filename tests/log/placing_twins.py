"""Both implementations of placing."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from millstream.log import _placing_pure

PURE: ModuleType = _placing_pure
COMPILED: ModuleType | None
try:
    COMPILED = importlib.import_module("millstream.log._placing")
except ImportError:
    COMPILED = None

both_twins = pytest.mark.parametrize(
    "twin",
    [
        pytest.param(PURE, id="pure"),
        pytest.param(
            COMPILED,
            id="compiled",
            marks=pytest.mark.skipif(COMPILED is None, reason="the compiled twin is not built"),
        ),
    ],
)
