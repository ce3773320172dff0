"""`mill log`: what it prints and how it ends, as transcripts in `transcripts/log-*.txt`.

A transcript is prose, with these lines in between:

    given a store                  a data directory, called DATA; also: a crashed store,
                                   a compacted store
    given FILE cut by N bytes      what happens to it, FILE as the commands print it
    given FILE deleted
    given FILE with a bit flipped at N
    given FILE overwritten from N to M
    $ mill …                       a command, then its output; `!` marks lines of stderr,
                                   and `exit N` its end when it is not 0

With MILLSTREAM_WRITE_TRANSCRIPTS=1 the outputs are written anew: then read what has changed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from log.stores import (
    BATCHES,
    DIRECTORY,
    NOW_MS,
    UUID,
    build,
    build_compacted,
    build_crashed,
    digest,
    flip,
    open_at,
)
from millstream.cli.main import main
from millstream.log import batch as batches
from millstream.log.partition import PartitionId

TRANSCRIPTS = sorted(Path(__file__).parent.joinpath("transcripts").glob("log-*.txt"))
BUILDERS: dict[str, Callable[[Path], None]] = {
    "a store": build,
    "a crashed store": build_crashed,
    "a compacted store": build_compacted,
}


class _Marking(io.StringIO):
    """Puts lines into one list, each with a mark, so that stdout and stderr keep their order."""

    def __init__(self, lines: list[str], mark: str) -> None:
        super().__init__()
        self._lines = lines
        self._mark = mark
        self._rest = ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        self._lines.extend(self._mark + line for line in whole)
        return len(text)


def mill(*arguments: str) -> tuple[int, list[str]]:
    """Exit code, and lines; those of stderr with a mark."""
    lines: list[str] = []
    with redirect_stdout(_Marking(lines, "")), redirect_stderr(_Marking(lines, "! ")):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0), lines
    return 0, lines


def damage(root: Path, what: str) -> None:
    name, _, deed = what.partition(" ")
    path = root / name.replace("orders/0/", f"{DIRECTORY}/")
    if deed == "deleted":
        path.unlink()
        return
    numbers = [int(number) for number in re.findall(r"\d+", deed)]
    data = path.read_bytes()
    if deed.startswith("cut by"):
        path.write_bytes(data[: -numbers[0]])
    elif deed.startswith("overwritten from"):
        start, end = numbers
        path.write_bytes(data[:start] + b"?" * (end - start) + data[end:])
    else:
        assert deed.startswith("with a bit flipped at"), what
        flip(path, numbers[0])


def replay(transcript: str, root: Path) -> Iterator[str]:
    """The transcript, with the output that commands have now."""
    is_output = False
    for line in transcript.splitlines():
        if line.startswith("given "):
            what = line.removeprefix("given ")
            if what in BUILDERS:
                BUILDERS[what](root)
            else:
                damage(root, what)
        if line.startswith("$ mill "):
            is_output = True
            yield line
            arguments = shlex.split(line.removeprefix("$ mill "))
            code, lines = mill(*(a.replace("DATA", str(root)) for a in arguments))
            for each in lines:
                yield each.replace(str(root), "DATA").replace(UUID.hex(), "UUID")
            if code:
                yield f"exit {code}"
        elif not line or not is_output:
            is_output = False
            yield line


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_transcript_is_what_happens(path: Path, tmp_path: Path) -> None:
    transcript = path.read_text(encoding="utf-8")
    now = "\n".join(replay(transcript, tmp_path / "data")) + "\n"
    if os.environ.get("MILLSTREAM_WRITE_TRANSCRIPTS"):
        path.write_text(now, encoding="utf-8")
    assert now == transcript


# ---- what a transcript cannot show


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize(
    "arguments", [("verify",), ("repair",), ("repair", "--apply"), ("dump", "orders/0")]
)
def test_a_running_broker_is_left_alone(root: Path, arguments: tuple[str, ...]) -> None:
    store = open_at(root)
    command, *rest = arguments
    positional = [one for one in rest if not one.startswith("-")]
    flags = [one for one in rest if one.startswith("-")]
    code, lines = mill("log", command, str(root), *positional, *flags)
    store.close()
    assert code == 1
    assert lines == [
        f"! mill: store_locked: {root} is in use: a broker runs on it already, with process id "
        f"{os.getpid()}, or `mill log` is reading it; wait or stop it, or choose another data "
        "directory"
    ]


@pytest.mark.parametrize("command", [("verify",), ("repair",), ("dump",)])
def test_looking_changes_not_a_byte(root: Path, command: tuple[str, ...]) -> None:
    flip(root / DIRECTORY / "00000000000000000012.log", 200)
    before = digest(root)
    rest = ("orders/0",) if command == ("dump",) else ()
    mill("log", *command, str(root), *rest)
    assert digest(root) == before


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_a_directory_that_is_not_there(tmp_path: Path, command: str) -> None:
    code, lines = mill("log", command, str(tmp_path / "nowhere"))
    assert (code, lines) == (
        1,
        [f"! mill: store_unreadable: there is no {tmp_path}/nowhere"],
    )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_a_brokers(tmp_path: Path) -> None:
    code, lines = mill("log", "verify", str(tmp_path))
    assert code == 1
    assert lines[0].startswith(f"! mill: format_unsupported: {tmp_path} is not a data directory")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, lines = mill("log", "verify", str(tmp_path / "file"))
    assert (code, lines) == (1, [f"! mill: store_unreadable: {tmp_path}/file: Not a directory"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read(root: Path) -> None:
    root.chmod(0)
    try:
        code, lines = mill("log", "verify", str(root))
    finally:
        root.chmod(0o700)
    assert code == 1
    assert lines[0].endswith("Permission denied; run this as the user that the broker runs as")


def test_a_newer_format_is_refused(root: Path) -> None:
    (root / "format").write_bytes(b"millstream 2\n")
    code, lines = mill("log", "verify", str(root))
    assert code == 1
    assert "was written by another version of Millstream" in lines[0]


def test_verify_as_json(root: Path) -> None:
    flip(root / DIRECTORY / "00000000000000000012.log", 200)
    code, lines = mill("log", "verify", str(root), "--json")
    page = json.loads("\n".join(lines))
    assert code == 1
    assert (page["ok"], page["errors"], page["warnings"]) == (False, 1, 0)
    assert page["checked"]["batches"] == BATCHES - 1
    (finding,) = page["findings"]
    assert finding["severity"] == "error"
    assert finding["place"] == "orders/0/00000000000000000012.log"
    assert (finding["position"], finding["offset"]) == (124, 15)


def test_repair_as_json(root: Path) -> None:
    flip(root / DIRECTORY / "00000000000000000012.log", 200)
    code, lines = mill("log", "repair", str(root), "--json")
    page = json.loads("\n".join(lines))
    assert (code, page["applied"]) == (0, False)
    assert [one["what"] for one in page["done"]] == ["bit restored"]


def test_dump_shows_any_record_there_can_be(root: Path) -> None:
    store = open_at(root)
    partition = store.partition(PartitionId("orders", 1))
    fields: list[batches.Fields] = [
        (NOW_MS, b"", b"two\nlines\x00", [("", None), ("n\udcff", b"\xff")]),
        (-(2**62), "größe".encode(), b'"', [("a b", b""), ("ms-lane", b"low")]),
    ]
    partition.append(batches.encode(fields, compression="zstd"), NOW_MS)
    store.checkpoint(NOW_MS)
    store.close()
    assert mill("log", "dump", str(root), "orders/1") == (
        0,
        [
            '0  2026-01-02T03:04:05.000Z  ""  "two\\nlines\\u0000"  '
            '{"": null, "n\\udcff": base64:/w==}',
            '1  -4611686018427387904ms  "größe"  "\\""  {a b: "", ms-lane: "low"}  lane=low',
        ],
    )
    code, lines = mill("log", "dump", str(root), "orders/1", "--json")
    assert code == 0
    assert json.loads(lines[0])["headers"] == [
        {"name": "", "value": None},
        {"name": "n?", "value": "/w==", "value_encoding": "base64"},
    ]
    assert json.loads(lines[1])["value"] == '"'


def test_dump_from_every_offset_begins_there(root: Path) -> None:
    for start in range(3 * BATCHES):
        code, lines = mill("log", "dump", str(root), "orders/0", "--from", str(start), "--json")
        assert code == 0
        assert [json.loads(line)["offset"] for line in lines] == list(range(start, 3 * BATCHES))


def test_dump_of_a_batch_that_does_not_decode_goes_on_behind_it(root: Path) -> None:
    from crc32c import crc32c

    path = root / DIRECTORY / "00000000000000000024.log"
    data = bytearray(path.read_bytes())
    data[61] = 0x03
    data[17:21] = crc32c(bytes(data[21:124])).to_bytes(4, "big")
    path.write_bytes(data)
    code, lines = mill("log", "dump", str(root), "orders/0", "--from", "23")
    assert code == 1
    assert lines[1].startswith("! mill: orders/0: offsets 24 to 26 cannot be decoded: record 0")
    assert [line.split()[0] for line in (lines[0], *lines[2:])] == ["23", "27", "28", "29"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("orders", "'orders' is not a partition: name a topic and a number, such as orders/0"),
        ("orders/x", "'orders/x' is not a partition: name a topic and a number, such as orders/0"),
        ("orders/7", "topic orders has partitions 0 to 1; there is no 7"),
        ("bills/0", "there is no topic bills"),
    ],
)
def test_dump_of_what_is_not_there(root: Path, name: str, message: str) -> None:
    code, lines = mill("log", "dump", str(root), name)
    assert code == 1
    (line,) = lines
    assert line.endswith(f"_unknown: {message}")
