"""`mill serve`: start a broker."""

from __future__ import annotations

import typer

from millstream.cli.options import with_settings
from millstream.config import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_settings
def serve(settings: Settings) -> None:
    """Start a broker, and run it until SIGTERM or SIGINT (Ctrl-C).

    A flag beats the environment (MILLSTREAM_…), which beats the settings file, which beats the
    default. Sizes are written like 64K, 256M or 2G; durations like 500ms, 30s, 5m, 24h or 7d.
    """
    from millstream.server import serve as run

    run(settings)
