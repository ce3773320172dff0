"""What groups may be called: who names one learns it before the broker is asked."""

from __future__ import annotations

# Names that begin with two underscores are the broker's own.
GROUP_NAME = r"(?!__)[A-Za-z0-9._:-]{1,255}"
GROUP_NAME_RULE = "use 1 to 255 of letters, digits, `.`, `_`, `:` and `-`, and no `__` at its begin"
