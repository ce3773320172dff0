"""Folders that both Spark and pyarrow know: of this machine, or s3://, gs://, hdfs://."""

from __future__ import annotations

import json
import os
import posixpath
from typing import Any

from pyarrow import fs


def opened(where: str) -> tuple[str, Any, str]:
    """A folder's URL for Spark, its file system for pyarrow, and its path there."""
    # Spark's own `file:/folder` and `hdfs:/folder` are URLs too.
    if ":/" in where:
        # Spark's name of S3, and everybody else's.
        files, root = fs.FileSystem.from_uri(where.replace("s3a://", "s3://", 1))
        return where.rstrip("/"), files, root.rstrip("/")
    path = os.path.abspath(where)
    return path, fs.LocalFileSystem(), path


def query_id(checkpoint: str) -> str:
    """The id that a streaming query has for as long as its checkpoint lives."""
    _, files, root = opened(checkpoint)
    with files.open_input_stream(posixpath.join(root, "metadata")) as stream:
        return str(json.loads(stream.read())["id"])
