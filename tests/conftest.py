"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline for a single example, nor for making one: the first pays for imports, and a busy
# machine for everything. A test that hangs is ended by pytest's own timeout.
settings.register_profile("millstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millstream")
