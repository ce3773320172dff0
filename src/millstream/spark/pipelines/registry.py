"""What a pipeline is, and where pipelines are found.

A pipeline is a function that is given a `Context`: a Spark session, its options, and the ways to
read topics and to run queries. Those that come with Millstream are rows of BUILT_IN. A user's own
is a function that turns frames into a frame, and `@pipeline` makes a pipeline of it:

    @pipeline(source="orders", sink="totals")
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("key").count()

`mill pipeline run path.py:totals` runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from millstream.errors import PipelineInvalid, PipelineUnknown

if TYPE_CHECKING:
    from millstream.spark.pipelines.context import Context

# To add one: a row here, with the module whose PIPELINE it is. The text is what `mill pipeline
# list` says, so that a list does not import Spark.
BUILT_IN = {
    "sql": ("millstream.spark.pipelines.sql", "SQL over topics, to a topic, files or here."),
    "archive": ("millstream.spark.pipelines.archive", "Topics into a lake of Parquet files."),
    "restore": ("millstream.spark.pipelines.restore", "A part of an archive, back into a topic."),
    "rollup": ("millstream.spark.pipelines.rollup", "Counts, sums and percentiles by window."),
    "deadletters": ("millstream.spark.pipelines.deadletters", "What fails, and why: a report."),
    "lag": ("millstream.spark.pipelines.lag", "Which groups fall behind, and where: a report."),
}


@dataclass(frozen=True, slots=True)
class Option:
    """A flag of one pipeline: `--NAME TEXT`, or `--NAME` alone where it is a switch.

    `default` None means that there is no value unless one is given.
    """

    name: str
    help: str
    default: str | None = None
    metavar: str = "TEXT"
    is_required: bool = False
    is_switch: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Something that can be run by name."""

    name: str
    help: str
    run: Callable[[Context], None]
    options: tuple[Option, ...] = ()
    # How many records a micro-batch takes at most, unless the user says otherwise.
    records_max: int = 1_000_000
    # A user's own function, for their tests: what turns frames into a frame.
    function: Callable[..., Any] | None = None

    def __call__(self, *frames: Any, **more: Any) -> Any:
        """What the decorated function does, without anything around it."""
        if self.function is None:
            raise PipelineInvalid(f"{self.name} is no function of frames", pipeline=self.name)
        return self.function(*frames, **more)


@dataclass(frozen=True, slots=True)
class FrameRecipe:
    """What `@pipeline` was given: where the frames come from and where the result goes."""

    function: Callable[..., Any]
    sources: tuple[str, ...]
    sink: str | None
    key: str | None
    mode: str
    source_options: Mapping[str, str] = field(default_factory=dict)
    sink_options: Mapping[str, str] = field(default_factory=dict)
    wants_context: bool = False


def pipeline(
    *,
    source: str | Sequence[str],
    sink: str | None = None,
    key: str | None = None,
    mode: str = "append",
    options: Sequence[Option] = (),
    source_options: Mapping[str, str] | None = None,
    sink_options: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Pipeline]:
    """Make a pipeline of a function: topics in, a frame out.

    The function gets a frame for each topic of `source`, with the rows that the data source gives
    under `source_options`; with a parameter `context` it gets the `Context` too. Its result goes to
    the topic `sink`, or wherever `--to` says. A result with a column `value` is written as it is;
    any other becomes one JSON object a row, under the key in the column `key`. `mode` is Spark's
    output mode.
    """
    sources = (source,) if isinstance(source, str) else tuple(source)

    def make(function: Callable[..., Any]) -> Pipeline:
        # Here, because that module needs this one.
        from millstream.spark.pipelines.frames import FRAME_OPTIONS, run_recipe

        recipe = FrameRecipe(
            function,
            sources,
            sink,
            key,
            mode,
            dict(source_options or {}),
            dict(sink_options or {}),
            "context" in inspect.signature(function).parameters,
        )
        own_name = name or function.__name__
        about = (inspect.getdoc(function) or f"{', '.join(sources)} → {sink or '--to'}").strip()
        return Pipeline(
            name=own_name,
            help=about.split("\n\n")[0].replace("\n", " "),
            run=lambda context: run_recipe(recipe, context),
            options=(*FRAME_OPTIONS, *options),
            function=function,
        )

    return make


def find(name: str) -> Pipeline:
    """The pipeline of that name, or `path.py:name`, or `package.module:name`."""
    if name in BUILT_IN:
        module = importlib.import_module(BUILT_IN[name][0])
        found: Pipeline = module.PIPELINE
        return found
    where, colon, attribute = name.rpartition(":")
    if not colon:
        raise PipelineUnknown(
            f"there is no pipeline {name}; there are {', '.join(BUILT_IN)}, and your own as "
            "path.py:function",
            pipeline=name,
        )
    module = _load(where)
    if attribute not in vars(module):
        found_ones = [one for one, value in vars(module).items() if isinstance(value, Pipeline)]
        has = f"; it has {', '.join(found_ones)}" if found_ones else ""
        raise PipelineUnknown(f"{where} has no {attribute}{has}", pipeline=name)
    value = getattr(module, attribute)
    if not isinstance(value, Pipeline):
        raise PipelineInvalid(
            f"{attribute} in {where} is no pipeline; decorate the function with "
            "@pipeline(source=…, sink=…), from millstream.spark.pipelines",
            pipeline=name,
        )
    return value


def _load(where: str) -> ModuleType:
    """A module by its file or by its name."""
    if not where.endswith(".py"):
        # As with `python -m`: modules beside where the user stands are found.
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name != where.partition(".")[0] and error.name != where:
                raise
            raise PipelineUnknown(f"there is no module {where}", pipeline=where) from error
    from pyspark.cloudpickle import register_pickle_by_value

    path = Path(where)
    if not path.is_file():
        raise PipelineUnknown(f"there is no file {where}", pipeline=where)
    # Not the file's own name: a file called json.py is not the module json.
    name = f"millstream_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # No executor can import it, so its functions travel whole.
    register_pickle_by_value(module)
    return module
