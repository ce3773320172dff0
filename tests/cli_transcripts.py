"""Transcripts of commands against a running broker.

A transcript is prose, with these lines in between:

    $ mill …                       a command, then its output; `!` marks lines of stderr,
                                   and `exit N` its end when it is not 0
    $ printf 'TEXT' | mill …       the same, with something in its pipe
    .                              an empty line of output; a truly empty line ends it

SERVER stands for where the broker is, TIME for a time; UUID, MEMBER and ID for what is made up.
With MILLSTREAM_WRITE_TRANSCRIPTS=1 the outputs are written anew: then read what has changed.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator

from millstream.cli.main import main

# What differs from run to run, and what stands for it.
VARYING = (
    (r"\b1[78]\d{14}\b", "TIME"),
    (r"\b1[78]\d{11}\b", "TIME"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "TIME"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"\bpython-[0-9a-f]{16}\b", "MEMBER"),
    (r"\b[0-9a-f]{16}\b", "ID"),
)


def mill(*arguments: str, given: bytes = b"") -> tuple[int, bytes, str]:
    """Exit code, what it printed, and what it complained."""
    streams = [
        io.TextIOWrapper(io.BytesIO(data), "utf-8", write_through=True) for data in (b"", b"")
    ]
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO(given), "utf-8")
    sys.stdout, sys.stderr = streams
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    out, err = (stream.buffer.getvalue() for stream in streams)
    return code, out, err.decode()


def replay(transcript: str, server: str) -> Iterator[str]:
    """The transcript, with the output that commands have now."""
    is_output = False
    for line in transcript.splitlines():
        command = re.fullmatch(r"\$ (?:printf ('.*') \| )?mill (.*)", line)
        if command:
            is_output = True
            yield line
            given = (
                shlex.split(command[1])[0].encode().decode("unicode_escape") if command[1] else ""
            )
            code, out, err = mill(*shlex.split(command[2]), given=given.encode())
            for text in out.decode().splitlines():
                yield _plain(text, server)
            yield from (f"! {text.replace(server, 'SERVER')}" for text in err.splitlines())
            if code:
                yield f"exit {code}"
        elif not line or not is_output:
            is_output = False
            yield line


def _plain(text: str, server: str) -> str:
    text = text.replace(server, "SERVER").rstrip()
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text or "."
