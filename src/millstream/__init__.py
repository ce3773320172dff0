"""Millstream, a message broker: a quick queue, a durable log and a work queue in one program.

This is the public face. What is listed in `__all__` keeps its name and meaning; a test freezes it.
"""

from __future__ import annotations

from millstream.errors import MillstreamError

__version__ = "0.1.0"

__all__ = ["MillstreamError", "__version__"]
