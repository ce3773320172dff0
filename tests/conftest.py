"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# No deadline for a single example: the first one pays for imports, and a busy machine for
# everything. A test that hangs is ended by pytest's own timeout.
settings.register_profile("millstream", deadline=None)
settings.load_profile("millstream")
