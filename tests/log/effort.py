"""How long property tests look: briefly by default, longer with `make test-faults`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(examples: int, steps: int = 40) -> settings:
    """For a property or a state machine; the full run looks twenty times as long."""
    is_full = os.environ.get("MILLSTREAM_FAULTS") == "full"
    return settings(
        max_examples=examples * 20 if is_full else examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
