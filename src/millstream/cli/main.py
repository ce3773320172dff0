"""The `mill` command.

Each noun is a file beside this one. It is imported only when it is used, so that `mill --help`
and the light commands are quick; its row in NOUNS is all that the help page shows of it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

import millstream
from millstream.errors import MillstreamError, SettingInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

# To add a noun: a row here, with the module whose `app` has its commands.
NOUNS = {
    "serve": ("millstream.cli.serve", "Start a broker."),
    "config": ("millstream.cli.config", "Show the settings in force, and where they came from."),
    "queue": ("millstream.cli.queue", "The queues of a running broker."),
    "topic": ("millstream.cli.topic", "The topics of a running broker."),
    "group": ("millstream.cli.group", "The consumer groups of a running broker."),
    "schedule": ("millstream.cli.schedule", "Records that are to appear later, or again."),
    "writer": ("millstream.cli.writer", "Who writes in batches, and how far each is."),
    "dlq": ("millstream.cli.dlq", "The dead letters of a running broker."),
    "work": ("millstream.cli.work", "Run a program for each record of a topic."),
    "pipeline": ("millstream.cli.pipeline", "Programs on Spark that read and write topics."),
    "log": ("millstream.cli.log", "Check, read and repair a data directory, without a broker."),
    "bench": ("millstream.cli.bench", "Measure this machine, against peers in the same run."),
}

EXIT_FAILED = 1
EXIT_USAGE = 2

# Some of the packages of `millstream[server]`; one missing means that only the light client is
# installed.
SERVER_PACKAGES = frozenset(
    ("fastapi", "httptools", "prometheus_client", "structlog", "uvicorn", "uvloop")
)
# The same for `millstream[spark]`.
SPARK_PACKAGES = frozenset(("pyspark", "pyarrow", "pandas", "matplotlib", "grpc"))


class LazyGroup(TyperGroup):
    """Has a stand-in for each noun, for the help page, and swaps in the real one when called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in NOUNS:
            module, _ = NOUNS[name]
            command = typer.main.get_command(importlib.import_module(module).app)
            _join_lines(command)
        return name, command, rest


def _join_lines(command: Any) -> None:
    """Paragraphs of help end where the terminal does, and not where their source does."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(one.replace("\n", " ") for one in paragraphs)
    for one in getattr(command, "commands", {}).values():
        _join_lines(one)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mill {millstream.__version__}")
        raise typer.Exit


@app.callback()
def mill(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """Millstream, a message broker: a quick queue, a durable log and a work queue in one."""


def _stand_in() -> None:
    """Never called: `LazyGroup` puts the real command in its place."""


for _name, (_, _text) in NOUNS.items():
    app.command(_name, help=_text)(_stand_in)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: no traceback for what a user can do something about."""
    try:
        app(arguments, prog_name="mill")
    except SettingInvalid as error:
        _fail(error, EXIT_USAGE)
    except MillstreamError as error:
        _fail(error, EXIT_FAILED)
    except ModuleNotFoundError as error:
        if error.name not in SERVER_PACKAGES | SPARK_PACKAGES:
            raise
        extra = "spark" if error.name in SPARK_PACKAGES else "server"
        print(
            f"mill: this command needs the package {error.name}, which is not installed; "
            f"pip install 'millstream[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(EXIT_FAILED)


def _fail(error: MillstreamError, status: int) -> None:
    print(f"mill: {error.code}: {error.message}", file=sys.stderr)
    sys.exit(status)
