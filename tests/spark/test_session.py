"""What a session has by itself."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from millstream.errors import SettingInvalid
from millstream.spark.session import ARROW_OPTIONS, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_session_has_what_source_and_sink_need(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.conf.get("spark.python.unix.domain.socket.enabled") == "true"
    assert spark.conf.get("spark.ui.enabled") == "false"


def test_arrow_in_java_does_not_look_at_every_value_twice(spark: SparkSession) -> None:
    jvm: Any = spark.sparkContext._jvm
    values = jvm.org.apache.arrow.memory.BoundsChecking.BOUNDS_CHECKING_ENABLED
    nulls = jvm.org.apache.arrow.vector.NullCheckingForGet.NULL_CHECKING_ENABLED
    assert (values, nulls) == (False, False)
    options = spark.conf.get("spark.executor.extraJavaOptions")
    assert options == ARROW_OPTIONS


def test_workers_run_the_python_of_this_environment(spark: SparkSession) -> None:
    from pyspark.sql.functions import udf

    @udf("string")
    def interpreter(_: int) -> str:
        return sys.executable

    [row] = spark.range(1).select(interpreter("id")).collect()
    assert os.path.realpath(row[0]) == os.path.realpath(os.environ["PYSPARK_PYTHON"])


def test_a_second_session_is_the_first(spark: SparkSession) -> None:
    again = spark_session("again", master="local[2]", settings={"spark.sql.ansi.enabled": "true"})
    assert again.sparkContext is spark.sparkContext


def test_a_connect_server_is_named_by_its_scheme() -> None:
    with pytest.raises(SettingInvalid, match="sc://HOST:PORT"):
        spark_session("x", remote="localhost:15002")
