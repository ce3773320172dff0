"""How a function of frames becomes a pipeline that runs."""

from __future__ import annotations

from millstream.errors import PipelineInvalid
from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.registry import FrameRecipe, Option
from millstream.spark.pipelines.targets import MODES, Target, stream_to, target_of, write_to

# The flags that every function of frames has.
FRAME_OPTIONS = (
    Option("source", "The topics, in the order of the function's parameters.", metavar="TOPICS"),
    Option("to", "Where results go: topic:NAME, parquet:DIR or terminal.", metavar="TARGET"),
    Option("key", "The column whose text is the key of a record.", metavar="COLUMN"),
    Option("mode", "Spark's output mode: append, update or complete.", metavar="MODE"),
    Option("batch", "Read all there is each time, instead of going on.", is_switch=True),
)


def run_recipe(recipe: FrameRecipe, context: Context) -> None:
    """Read the topics, call the function, and write what it answers."""
    options = context.options
    sources = options.names("source") or list(recipe.sources)
    if len(sources) != len(recipe.sources):
        options.refuse(
            "source",
            f"names {len(sources)} topics, and the pipeline reads {len(recipe.sources)}: "
            + ", ".join(recipe.sources),
        )
    target = _target(recipe, context)
    mode = options.get("mode", recipe.mode)
    if mode not in MODES:
        options.refuse("mode", f"is {mode!r}; it is one of {', '.join(MODES)}")
    key = options.get("key", recipe.key)
    is_batch = options.is_on("batch")
    if is_batch and context.is_continuous:
        options.refuse("batch", "reads what there is and ends; it cannot go with --continuous")
    read = context.table if is_batch else context.read
    frames = [read(topic, **recipe.source_options) for topic in sources]
    more = {"context": context} if recipe.wants_context else {}
    result = recipe.function(*frames, **more)
    if not hasattr(result, "isStreaming"):
        raise PipelineInvalid(
            f"{recipe.function.__name__} answers {type(result).__name__}, and a pipeline answers a "
            "DataFrame",
            pipeline=context.name,
        )
    if is_batch or not result.isStreaming:
        write_to(context, result, target, key=key, sink_options=dict(recipe.sink_options))
        return
    stream_to(context, result, target, mode=mode, key=key, sink_options=dict(recipe.sink_options))
    context.wait()


def _target(recipe: FrameRecipe, context: Context) -> Target:
    text = context.options.get("to", recipe.sink)
    if text is None:
        context.options.refuse("to", "is needed: the pipeline names no topic of its own")
    try:
        return target_of(text)
    except ValueError as error:
        context.options.refuse("to", str(error))
