"""The name by which Spark finds the data source `millstream` by itself; nothing else is here."""

from millstream.spark.datasource import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
