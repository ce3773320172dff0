"""A Spark session that has what Millstream's source, sink and pipelines need.

Each setting is here because something fails without it; the caller's `settings` win over all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import millstream
from millstream.errors import SettingInvalid
from millstream.spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What a session may be told at any time; a Connect server takes these from a client too.
RUNTIME_SETTINGS = {
    # Times are instants everywhere in Millstream.
    "spark.sql.session.timeZone": "UTC",
    # The source pushes filters on offset, time and partition down to the log; a reader that can do
    # that and may not is an error in Spark.
    "spark.sql.python.filterPushdown.enabled": "true",
}
# Arrow in Java looks, for every value, whether it is there and not null. Spark never asks for one
# that is not, and reading from Python takes a tenth less without.
ARROW_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
# What is fixed when the JVM starts.
START_SETTINGS = {
    "spark.executor.extraJavaOptions": ARROW_OPTIONS,
    # A tenth quicker than a socket on the loopback address.
    "spark.python.unix.domain.socket.enabled": "true",
    # Programs that end by themselves have no use for a page, and two of them would need two ports.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# On the machine of the driver, where the loopback address is all that is needed.
LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Two hundred tasks for each shuffle are for clusters.
    "spark.sql.shuffle.partitions": "8",
}


def spark_session(
    app_name: str,
    *,
    master: str = "local[*]",
    remote: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session on `master`, or over Connect on `remote` (`sc://host:port`).

    In one process there is one session; a second call answers it, with its runtime settings
    changed.
    """
    wanted = dict(settings or {})
    if remote is not None:
        return _connected(app_name, remote, wanted)
    _prepare_environment()
    from pyspark.sql import SparkSession

    given = RUNTIME_SETTINGS | START_SETTINGS | _paths() | _java_options()
    if master.startswith("local"):
        given |= LOCAL_SETTINGS
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in (given | wanted).items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _connected(app_name: str, remote: str, wanted: dict[str, str]) -> SparkSession:
    """The server has its own Java and its own Python, with `millstream[spark]` installed."""
    from pyspark.sql import SparkSession

    is_local = remote == "local" or remote.startswith("local[")
    if not (is_local or remote.startswith("sc://")):
        raise SettingInvalid(
            f"remote is {remote!r}; where a Spark Connect server is reads sc://HOST:PORT",
            setting="remote",
            value=remote,
        )
    if is_local:
        # The server is started here, inside this process's JVM.
        _prepare_environment()
    builder = SparkSession.builder.appName(app_name).remote(remote)
    for name, value in (RUNTIME_SETTINGS | wanted).items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _prepare_environment() -> None:
    """What the JVM and the Python workers read when they start."""
    # Otherwise workers are whatever `python3` is on PATH, and say only that they "failed to
    # connect back".
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ["JAVA_HOME"] = str(java_home())
    # Spark finds the source by its module's name on the path of the driver's own workers.
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if (ours := _folder()) not in folders and not _is_installed(ours):
        os.environ["PYTHONPATH"] = os.pathsep.join([ours, *filter(None, folders)])


def _paths() -> dict[str, str]:
    """Executors on machines where this package lies in the same place find it without more."""
    ours = _folder()
    return {} if _is_installed(ours) else {"spark.executorEnv.PYTHONPATH": ours}


def _java_options() -> dict[str, str]:
    """Spark's own log begins with a page of remarks, and each error comes several times."""
    file = Path(__file__).parent / "log4j2.properties"
    options = f"-Dlog4j2.configurationFile={file.as_uri()} {ARROW_OPTIONS}"
    return {"spark.driver.extraJavaOptions": options}


def _folder() -> str:
    """Where `millstream` and `pyspark_millstream` lie side by side."""
    return str(Path(millstream.__file__).parent.parent)


def _is_installed(folder: str) -> bool:
    """Whether every Python of this environment finds it."""
    return Path(folder).name in ("site-packages", "dist-packages")
