"""What a batch must pass before an engine gives it a place: the same for every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import AppendTooLarge
from millstream.log import batch as batches
from millstream.log.journal import BODY_BYTES_MAX
from millstream.log.placing import ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millstream.log.batch import Data, Header
    from millstream.log.partition import PartitionSettings


def admit(batch: Data, header: Header | None, settings: PartitionSettings) -> Header:
    """The batch's header; raises when somebody would fail to open the batch.

    Who passes a header vouches for the batch, and it stays closed; see `protocol.py`.
    """
    if header is None:
        return batches.examine(batch, bytes_max=settings.batch_bytes_max)
    if settings.compact and not header.is_control:
        # Compaction will have to open it, whoever vouches for it.
        batches.keys(batch)
    return header


def require_one_frame(sizes: Iterable[int]) -> None:
    """Raise when batches of these sizes are too much for one atomic append."""
    size = sum(ENTRY.size + size for size in sizes)
    if size > BODY_BYTES_MAX:
        raise AppendTooLarge(
            f"{size} bytes are more than one atomic append may have; send it in parts",
            limit_bytes=BODY_BYTES_MAX,
        )
