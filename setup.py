"""Builds the compiled twin of the batch codec; everything else is in pyproject.toml.

The twin is optional three times over: without its source, without a C compiler, or with
MILLSTREAM_PURE=1 in the environment, the package is pure Python and works the same.
"""

from __future__ import annotations

import os
from glob import glob

from setuptools import Extension, setup

TWIN = "src/millstream/log/_batch.pyx"


def twins() -> list[Extension]:
    if os.environ.get("MILLSTREAM_PURE") == "1" or not os.path.exists(TWIN):
        return []
    # Optional: a compiler that is missing or fails prints a warning and does not end the build.
    return [
        Extension(
            "millstream.log._batch",
            [TWIN],
            depends=sorted(glob("src/millstream/log/_batch_*.pxi")),
            optional=True,
            extra_compile_args=["-O3"],
        )
    ]


setup(ext_modules=twins())
