"""Pipelines on Spark: those that come with Millstream, and the way to write your own.

    from millstream.spark.pipelines import pipeline

See `registry` for what one is.
"""

from __future__ import annotations

from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.options import Options
from millstream.spark.pipelines.registry import Option, Pipeline, pipeline

__all__ = ["Context", "Option", "Options", "Pipeline", "pipeline"]
