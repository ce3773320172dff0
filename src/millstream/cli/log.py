"""`mill log`: look into a data directory, check it and repair it, while no broker runs on it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Optional

import msgspec
import typer

from millstream.cli.dumping import batch_lines, record_lines
from millstream.errors import OffsetOutOfRange
from millstream.log.disk import SystemDisk
from millstream.log.offline import find_partition, reading, survey, unreadable
from millstream.log.overlay import OverlayDisk
from millstream.log.recovery import Finding
from millstream.log.repair import repair as run_repair
from millstream.log.verify import Remark, Tally, log_bytes
from millstream.log.verify import verify as run_verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Check, read and repair a data directory, without a broker.",
)

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The broker's data directory.")]

EXIT_WRONG = 1


@app.command()
def verify(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Check every byte, change none, and list what is wrong.

    Reads every batch of every partition, the seals, the indexes, the journal and the checkpoint.
    An error is damage: something that was durable is lost or not what it was. A warning is what a
    crash leaves and the next start puts right, or damage that was dealt with before.

    Ends with 0 when there is no error, else with 1.
    """
    disk, root = SystemDisk(), os.path.abspath(directory)
    tally = Tally()
    with _refusing(root), reading(disk, root), _progress(disk, root) as progress:
        remarks = list(run_verify(disk, root, tally, progress))
    counts = {
        severity: sum(remark.severity == severity for remark in remarks)
        for severity in ("error", "warning", "info")
    }
    if as_json:
        page = {
            "directory": root,
            "ok": not counts["error"],
            "errors": counts["error"],
            "warnings": counts["warning"],
            "checked": msgspec.to_builtins(tally),
            "findings": [remark._asdict() for remark in remarks],
        }
        print(msgspec.json.format(msgspec.json.encode(page)).decode())
    else:
        for remark in remarks:
            print(_line(remark))
        print(_summary(counts, tally))
    if counts["error"]:
        raise typer.Exit(EXIT_WRONG)


@app.command()
def dump(
    directory: Directory,
    partition: Annotated[
        str, typer.Argument(metavar="TOPIC/PARTITION", help="Which one, such as orders/0.")
    ],
    *,
    start: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--from", metavar="OFFSET", min=0, help="Begin here, not at the start."),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--limit", metavar="N", min=0, help="At most so many lines."),
    ] = None,
    show_batches: Annotated[
        bool, typer.Option("--batches", help="A line for each batch instead: its header.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object in each line.")] = False,
) -> None:
    """Print the records of a partition, one a line.

    A line has the offset, the time, key, value, and headers and lane if there are any. Text is in
    quotes; bytes that are no text are in base64.

    What cannot be read is named on stderr and skipped, and the end is then 1.
    """
    disk, root = SystemDisk(), os.path.abspath(directory)
    trouble = 0

    def complain(text: str, *, is_damage: bool = True) -> None:
        nonlocal trouble
        trouble += is_damage
        sys.stdout.flush()
        print(f"mill: {partition}: {text}", file=sys.stderr)

    with _refusing(root), reading(disk, root):
        found = survey(disk, root)
        files = find_partition(found, partition)
        if start is not None and start < files.start_offset:
            text = f"the log starts at offset {files.start_offset}, not at {start}"
            complain(text, is_damage=False)
        lines = (batch_lines if show_batches else record_lines)(
            found.disk, files, start or 0, complain, as_json=as_json
        )
        end = files.start_offset
        printed = 0
        while limit is None or printed < limit:
            line = next(lines, None)
            if line is None:
                break
            print(line.text)
            printed += 1
            end = line.next_offset
        if start is not None and not printed and limit != 0:
            _require_offset(partition, start, max(end, files.durable_to))
    if trouble:
        raise typer.Exit(EXIT_WRONG)


@app.command()
def repair(
    directory: Directory,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it. Without this, nothing is changed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Put a data directory in order: say what would be done, or do it with --apply.

    It is what a broker does when it starts, but reading every byte: rebuilds indexes and seals,
    cuts torn tails, writes what only the journal has into its segments, restores single flipped
    bits, and moves what cannot be read into quarantine, where it stays. Make a copy of the
    directory first when it matters.
    """
    disk, root = SystemDisk(), os.path.abspath(directory)
    now_ms = time.time_ns() // 1_000_000
    with _refusing(root):
        with reading(disk, root):
            findings = [] if apply else run_repair(OverlayDisk(disk), root, now_ms)
        if apply:
            # It takes the lock itself, to write.
            findings = run_repair(disk, root, now_ms)
    if as_json:
        page = {"directory": root, "applied": apply, "done": [one._asdict() for one in findings]}
        print(msgspec.json.format(msgspec.json.encode(page)).decode())
        return
    for finding in findings:
        print(_deed(finding))
    if not findings:
        print("nothing to repair")
    elif apply:
        print(f"{_count(len(findings), 'repair')} done; `mill log verify` checks the result")
    else:
        print(f"{_count(len(findings), 'repair')} to do, nothing was changed; --apply does it")


# ---- what is printed


def _line(remark: Remark) -> str:
    where = remark.place if remark.position is None else f"{remark.place} at {remark.position}"
    return f"{remark.severity:<7}  {where}: {remark.message}"


def _summary(counts: dict[str, int], tally: Tally) -> str:
    checked = ", ".join(
        (
            _count(tally.partitions, "partition"),
            _count(tally.segments, "segment"),
            _count(tally.batches, "batch", "batches"),
            _count(tally.records, "record"),
            _count(tally.bytes, "byte"),
        )
    )
    errors, warnings = _count(counts["error"], "error"), _count(counts["warning"], "warning")
    return f"{errors}, {warnings}; checked {checked}"


# Where recovery's own word is short for somebody who has not read its code.
DEEDS = {
    "damage": "unreadable bytes moved to quarantine",
    "quarantined": "unreadable end moved to quarantine",
    "set aside": "segment moved to quarantine",
    "tail cut": "torn tail cut",
    "gap": "records lost",
}


def _deed(finding: Finding) -> str:
    where = f"{finding.partition}: " if finding.partition else ""
    return f"{where}{DEEDS.get(finding.what, finding.what)}: {finding.detail}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _require_offset(partition: str, start: int, end: int) -> None:
    if start > end:
        raise OffsetOutOfRange(
            f"{partition} ends at offset {end}; {start} is behind it", offset=start, end=end
        )


@contextmanager
def _refusing(root: str) -> Iterator[None]:
    """What the system refuses gets a message instead of a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unreadable(root, error) from error


@contextmanager
def _progress(disk: SystemDisk, root: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns: tuple[Any, ...] = ("checking", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=log_bytes(disk, root))
        yield lambda count: bar.advance(task, count)
