"""Repair: recovery that reads every byte, and nothing else.

It rebuilds indexes and seals, cuts torn tails, and puts what cannot be read into quarantine. On an
overlay it is the dry run.
"""

from __future__ import annotations

from millstream.errors import FormatUnsupported
from millstream.log.checkpoint import read_copies
from millstream.log.disk import Disk, read_file
from millstream.log.offline import check_root, survey
from millstream.log.recovery import Finding
from millstream.log.store import FORMAT, StoreOptions, open_store


def repair(disk: Disk, root: str, now_ms: int) -> list[Finding]:
    """Put the directory in order; answers what was done. Raises StoreLocked when a broker runs."""
    check_root(disk, root)
    _check_format(disk, root)
    before = _notice(disk, root)
    store = open_store(disk, root, now_ms, StoreOptions(is_thorough=True))
    store.close()
    return before + store.findings


def _check_format(disk: Disk, root: str) -> None:
    """Recovery may not guess in which format the files are, but whoever repairs may know."""
    known = read_file(disk, f"{root}/format")
    if known != FORMAT:
        says = "is missing" if known is None else f"says {known[:40].decode(errors='replace')!r}"
        raise FormatUnsupported(
            f"{root}/format {says}; if you know that this version wrote the directory, make the "
            f"file anew with the line {FORMAT.decode().strip()!r} and try again",
            path=root,
        )


def _notice(disk: Disk, root: str) -> list[Finding]:
    """What recovery puts right without a word, because every start does."""
    findings: list[Finding] = []
    copies = read_copies(disk, f"{root}/checkpoint")
    if disk.size_of(f"{root}/checkpoint") is None:
        findings.append(Finding("", "checkpoint written", "there was none"))
    elif copies.count(None) == 1:
        damaged = copies.index(None) + 1
        findings.append(
            Finding("", "checkpoint written", f"copy {damaged} of 2 was damaged, the other counted")
        )
    found = survey(disk, root)
    batches = sum(len(evidence.entries) for evidence in found.evidence.values())
    if batches:
        detail = f"{batches} batches were brought to their segments"
        findings.append(Finding("", "journal replayed", detail))
    return findings
