"""`mill pipeline`: programs on Spark that read topics, and write topics, files and reports."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
import typer.main
from rich.markup import escape
from typer.core import TyperGroup

from millstream.cli.printing import print_json, print_table, show_time
from millstream.cli.remote import Ca, Server
from millstream.errors import MillstreamError, PipelineInvalid, SettingInvalid
from millstream.spark.pipelines.registry import BUILT_IN, Option, Pipeline, find
from millstream.wire.places import DEFAULT_SERVER

if TYPE_CHECKING:
    from millstream.spark.pipelines.running import RunSettings
    from millstream.spark.pipelines.state import Status

Folder = Annotated[
    Path,
    typer.Option(
        "--dir",
        metavar="DIR",
        envvar="MILLSTREAM_PIPELINES",
        help="Where runs keep their state, a folder for each name.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Text = Optional[str]  # noqa: UP045  read at run time
DEFAULT_DIR = Path("pipelines")


class PipelineGroup(TyperGroup):
    """Each pipeline is a command with its own flags, made when it is called: the stand-ins are for
    the help page."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ARG002  typer's own
        name, *rest = args
        return name, command_of(find(name), name), rest


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Programs on Spark that read topics, and write topics, files and reports.",
)
runs = typer.Typer(
    cls=PipelineGroup,
    no_args_is_help=True,
    help="Run a pipeline: one of `mill pipeline list`, or your own as path.py:function. Each has "
    "flags of its own: `mill pipeline run sql --help`.",
    subcommand_metavar="NAME [OPTIONS]",
)
app.add_typer(runs, name="run")


def _stand_in() -> None:
    """Never called: `PipelineGroup` puts the real command in its place."""


for _name, (_, _about) in BUILT_IN.items():
    runs.command(_name, help=_about)(_stand_in)


@app.command("list")
def list_pipelines(as_json: Json = False) -> None:
    """Print the pipelines that come with Millstream."""
    if as_json:
        print_json([{"name": name, "help": text} for name, (_, text) in BUILT_IN.items()])
        return
    print_table(("name", "what it does"), [(n, text) for n, (_, text) in BUILT_IN.items()], texts=2)


@app.command()
def status(
    name: Annotated[Text, typer.Argument(metavar="[NAME]", help="Only this run.")] = None,
    folder: Folder = DEFAULT_DIR,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Print how far runs are, and how they ended."""
    from millstream.spark.pipelines.state import RunFolder, all_runs

    folders = [RunFolder(folder, name)] if name is not None else all_runs(folder)
    found = [one for run in folders if (one := run.read()) is not None]
    if name is not None and not found:
        raise SettingInvalid(
            f"nothing was run under the name {name} in {folder}", setting="name", value=name
        )
    lags = {one.name: _lag(one, ca) for one in found}
    if as_json:
        import msgspec

        pages = [msgspec.to_builtins(one) | {"lag": lags[one.name]} for one in found]
        print_json(pages)
        return
    rows = [
        (
            one.name,
            one.pipeline,
            one.state,
            show_time(one.changed_ms),
            f"{one.records:,}",
            f"{one.records_ever:,}",
            "–" if lags[one.name] is None else f"{lags[one.name]:,}",
        )
        for one in found
    ]
    columns = ("name", "pipeline", "state", "last change", "records", "of all runs", "lag")
    print_table(columns, rows, texts=4)
    for one in found:
        if one.error is not None:
            print(f"{one.name}: {one.error}")


def _lag(one: Status, ca: str | None) -> int | None:
    """What the broker says of the run's group; None when it does not know."""
    from urllib.parse import quote

    from millstream.cli.remote import Remote

    if not one.server:
        return None
    try:
        page = Remote(one.server, ca).call("GET", f"/v1/groups/{quote(one.group, safe='')}/lag")
    except MillstreamError:
        return None
    return int(page.json()["messages"])


# ---- the flags that every pipeline has

Name = Annotated[
    Text,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Of this run; each name goes on where it ended. By default the pipeline's.",
    ),
]
Checkpoint = Annotated[
    Text,
    typer.Option(
        "--checkpoint",
        metavar="URL",
        help="Where Spark keeps how far it is; by default in --dir. On a cluster, a place that all "
        "its machines see.",
    ),
]
Group = Annotated[
    Text,
    typer.Option(
        "--group",
        metavar="NAME",
        help="The group to which offsets are committed; by default pipeline-NAME.",
    ),
]
Continuous = Annotated[
    bool, typer.Option("--continuous", help="Go on as records come, instead of catching up.")
]
Every = Annotated[
    Text,
    typer.Option(
        "--every", metavar="TIME", help="With --continuous: between two micro-batches, as 10s."
    ),
]
MaxRecords = Annotated[
    Optional[int],  # noqa: UP045  read at run time
    typer.Option("--max-records", metavar="N", min=1, help="At most so many a micro-batch."),
]
Master = Annotated[
    str,
    typer.Option(
        "--master", metavar="URL", help="Where Spark runs: local[*], spark://… or k8s://…."
    ),
]
RemoteUrl = Annotated[
    Text, typer.Option("--remote", metavar="URL", help="A Spark Connect server: sc://HOST:PORT.")
]
Conf = Annotated[
    Optional[list[str]],  # noqa: UP045  read at run time
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; may be repeated."),
]


# ---- a command for each pipeline


def command_of(pipeline: Pipeline, shown_name: str) -> Any:
    """The command that runs it: flags that all have, and those of its own."""
    _require_own_names(pipeline)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # What stands in brackets would be taken for a style.
    single.command(shown_name, help=escape(pipeline.help))(_runner(pipeline))
    return typer.main.get_command(single)


def _require_own_names(pipeline: Pipeline) -> None:
    """Of two flags of one name, nobody could say which was meant."""
    common = inspect.signature(_settings, eval_str=True).parameters.values()
    parameters = (*common, *_OUTPUT)
    # Of what typer is told of a flag, its name is the first.
    taken = {one.annotation.__metadata__[0].default for one in parameters}
    for option in pipeline.options:
        flag = f"--{option.name}"
        if flag in taken:
            raise PipelineInvalid(
                f"the pipeline {pipeline.name} has an option {option.name!r}, and there is a flag "
                f"{flag} already; give it another name",
                pipeline=pipeline.name,
            )
        taken.add(flag)


def _runner(pipeline: Pipeline) -> Callable[..., None]:
    own = {_field(option.name): option for option in pipeline.options}

    def call(**given: Any) -> None:
        values = {
            option.name: _text(given.pop(field), option=option) for field, option in own.items()
        }
        as_json, is_quiet = given.pop("as_json"), given.pop("is_quiet")
        _run(pipeline, values, _settings(**given), as_json=as_json, is_quiet=is_quiet)

    common = inspect.signature(_settings, eval_str=True).parameters.values()
    parameters = [*(_flag(field, option) for field, option in own.items()), *common, *_OUTPUT]
    # typer reads the flags from here.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _run(
    pipeline: Pipeline,
    values: dict[str, str | None],
    settings: RunSettings,
    *,
    as_json: bool,
    is_quiet: bool,
) -> None:
    from millstream.spark.pipelines.progress import progress_for
    from millstream.spark.pipelines.running import run_pipeline

    name = settings.name or pipeline.name
    progress = progress_for(name, sys.stderr, is_quiet=is_quiet)
    done = run_pipeline(pipeline, values, settings, progress=progress)
    if as_json:
        print_json(done)
    elif not is_quiet:
        records = f", {done.records:,} records" if done.records else ""
        behind = f", about {done.behind:,} to go" if done.behind else ""
        print(f"{name}: {done.state}{records}{behind}", file=sys.stderr)


def _settings(
    *,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    name: Name = None,
    folder: Folder = DEFAULT_DIR,
    checkpoint: Checkpoint = None,
    group: Group = None,
    is_continuous: Continuous = False,
    every: Every = None,
    records_max: MaxRecords = None,
    master: Master = "local[*]",
    remote: RemoteUrl = None,
    conf: Conf = None,
) -> Any:
    """The flags that every pipeline has."""
    from millstream.spark.pipelines.running import RunSettings

    spark_settings = {}
    for one in conf or ():
        key, equals, value = one.partition("=")
        if not (equals and key):
            raise SettingInvalid(
                f"--conf is {one!r}; it takes NAME=VALUE", setting="conf", value=one
            )
        spark_settings[key] = value
    return RunSettings(
        server=server,
        ca=ca,
        name=name,
        folder=folder,
        checkpoint=checkpoint,
        group=group,
        is_continuous=is_continuous,
        every=every,
        records_max=records_max,
        master=master,
        remote=remote,
        spark_settings=spark_settings,
    )


_OUTPUT = (
    inspect.Parameter(
        "as_json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print how it went as JSON.")],
    ),
    inspect.Parameter(
        "is_quiet",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--quiet", help="Show no progress.")],
    ),
)


def _flag(field: str, option: Option) -> inspect.Parameter:
    text = option.help if option.default is None else f"{option.help} [default: {option.default}]"
    if option.is_required:
        text = f"{option.help} [needed]"
    kind: Any = Optional[str]  # noqa: UP045  read at run time
    if option.is_switch:
        kind = bool
    flag = typer.Option(
        f"--{option.name}",
        metavar=None if option.is_switch else option.metavar,
        help=escape(text),
        rich_help_panel="This pipeline",
    )
    return inspect.Parameter(
        field,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if option.is_switch else None,
        annotation=Annotated[kind, flag],
    )


def _field(name: str) -> str:
    """What a flag is called in Python; `own_` keeps apart a flag that all have too."""
    return "own_" + re.sub(r"\W", "_", name)


def _text(value: object, *, option: Option) -> str | None:
    if option.is_switch:
        return "true" if value else option.default
    return None if value is None else str(value)
