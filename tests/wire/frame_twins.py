"""Both implementations of the frame codec."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from millstream.wire import _frames_pure

PURE: ModuleType = _frames_pure
COMPILED: ModuleType | None
try:
    COMPILED = importlib.import_module("millstream.wire._frames")
except ImportError:
    COMPILED = None

needs_compiled = pytest.mark.skipif(COMPILED is None, reason="the compiled twin is not built")
both_twins = pytest.mark.parametrize(
    "twin",
    [
        pytest.param(PURE, id="pure"),
        pytest.param(COMPILED, id="compiled", marks=needs_compiled),
    ],
)
