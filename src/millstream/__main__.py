"""`python -m millstream` is `mill`."""

from __future__ import annotations

from millstream.cli.main import main

main()
