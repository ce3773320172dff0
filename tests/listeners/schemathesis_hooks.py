"""Loaded by schemathesis: waits that it makes up are cut short, or a run would take hours, and
streams end."""

from __future__ import annotations

from typing import Any

import schemathesis

TIMEOUT_S = 0.01


@schemathesis.hook
def before_call(context: object, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    del context, kwargs
    query = case.query or {}
    body = case.body
    if isinstance(body, dict) and _is_wait(body.get("wait_ms"), 30_000):
        body["wait_ms"] = TIMEOUT_S * 1000
    # A stream that follows its topic has no end.
    if query.get("follow") in (True, "true"):
        query["follow"] = "false"
    if _is_wait(query.get("timeout"), 30):
        query["timeout"] = TIMEOUT_S


def _is_wait(value: object, most: float) -> bool:
    """One that the broker takes."""
    try:
        return 0 < float(value) <= most  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
