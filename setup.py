"""Builds the compiled twins of the hot codecs; everything else is in pyproject.toml.

A twin is optional three times over: without its source, without a C compiler, or with
MILLSTREAM_PURE=1 in the environment, the package is pure Python and works the same.
"""

from __future__ import annotations

import os
from glob import glob

from setuptools import Extension, setup

# Batches of records; where they are placed, and group commit, which needs that; WebSocket frames.
TWINS = (
    "millstream.log._batch",
    "millstream.log._placing",
    "millstream.engine._appends",
    "millstream.wire._frames",
)


def twins() -> list[Extension]:
    if os.environ.get("MILLSTREAM_PURE") == "1":
        return []
    return [twin(name) for name in TWINS if os.path.exists(source_of(name))]


def twin(name: str) -> Extension:
    source = source_of(name)
    # Optional: a compiler that is missing or fails prints a warning and does not end the build.
    return Extension(
        name,
        [source],
        # What is included, and what any of them may know of another.
        depends=sorted(
            glob(source.replace(".pyx", "_*.pxi")) + glob("src/**/*.pxd", recursive=True)
        ),
        optional=True,
        extra_compile_args=["-O3"],
    )


def source_of(name: str) -> str:
    return f"src/{name.replace('.', '/')}.pyx"


setup(ext_modules=twins())
