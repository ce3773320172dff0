"""What `mill log dump` prints: a partition's records or batches as lines of text or JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.batch import Header, Record
from millstream.log.disk import Disk
from millstream.log.offline import Batch, Broken, PartitionFiles, walk_log, was_durable
from millstream.log.recovery import Found
from millstream.log.segment import stem

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Line(NamedTuple):
    """A line, and the offset after what it shows."""

    text: str
    next_offset: int


class Complain(Protocol):
    def __call__(self, text: str, *, is_damage: bool = True) -> None: ...


def record_lines(
    disk: Disk, files: PartitionFiles, start: int, complain: Complain, *, as_json: bool
) -> Iterator[Line]:
    """The records from an offset on; what cannot be shown is complained of."""
    start = max(start, files.start_offset)
    for _, batch in _batches(disk, files, start, complain):
        header = batch.header
        try:
            records = batches.decode(batch.data)
        except BatchInvalid as error:
            complain(
                f"offsets {header.base_offset} to {header.last_offset} cannot be decoded: "
                f"{error.message}"
            )
            continue
        for record in records:
            if record.offset >= start:
                text = _record_json(record) if as_json else _record_text(record)
                yield Line(text, record.offset + 1)


def batch_lines(
    disk: Disk, files: PartitionFiles, start: int, complain: Complain, *, as_json: bool
) -> Iterator[Line]:
    """The headers of the batches from the one on that holds an offset."""
    start = max(start, files.start_offset)
    for one, batch in _batches(disk, files, start, complain):
        fields = _batch_fields(f"{stem(one.base_offset, one.generation)}.log", batch)
        text = json.dumps(fields) if as_json else _batch_text(fields, batch.header)
        yield Line(text, batch.header.next_offset)


def _batches(
    disk: Disk, files: PartitionFiles, start: int, complain: Complain
) -> Iterator[tuple[Found, Batch]]:
    """Batches that reach past an offset, in order. `end` is where the log has got to."""
    end = files.start_offset
    for at, one in enumerate(files.segments):
        is_last = at == len(files.segments) - 1
        follows = files.durable_to if is_last else files.segments[at + 1].base_offset
        if not is_last and follows <= start:
            end = follows
            continue
        if one.base_offset > max(end, start):
            complain(f"offsets {end} to {one.base_offset - 1} are missing")
        path = f"{files.directory}/{stem(one.base_offset, one.generation)}.log"
        for piece in walk_log(disk, path, one.base_offset, exact=one.generation == 0):
            if isinstance(piece, Batch):
                end = piece.header.next_offset
                if end > start:
                    yield one, piece
                continue
            is_damage = was_durable(disk, files, one, piece)
            if is_damage:
                end = max(end, piece.resumes_with if piece.resumes_with >= 0 else follows)
            if end > start or not is_damage:
                name = f"{stem(one.base_offset, one.generation)}.log at {piece.position}"
                complain(_broken_text(name, piece, end, is_damage), is_damage=is_damage)
            if not is_damage:
                break
        if one.seal is not None:
            end = max(end, one.seal.next_offset)
        elif one.generation:
            end = max(end, follows)
    if files.durable_to > max(end, start):
        complain(f"offsets {end} to {files.durable_to - 1} are missing")


def _broken_text(name: str, piece: Broken, end: int, is_damage: bool) -> str:
    if not is_damage:
        return f"{name}: a torn tail, which the next start cuts off ({piece.reason})"
    return f"{name}: offsets {piece.offset} to {end - 1} cannot be read: {piece.reason}"


# ---- records


def _record_text(record: Record) -> str:
    parts = [str(record.offset), _time(record.timestamp), _text(record.key), _text(record.value)]
    if record.headers:
        headers = ", ".join(f"{_name(name)}: {_text(value)}" for name, value in record.headers)
        parts.append("{" + headers + "}")
    if record.lane is not None:
        parts.append(f"lane={record.lane}")
    return "  ".join(parts)


def _record_json(record: Record) -> str:
    fields: dict[str, Any] = {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "time": _time(record.timestamp),
        **_json_bytes("key", record.key),
        **_json_bytes("value", record.value),
        "headers": [
            {"name": _printable(name), **_json_bytes("value", value)}
            for name, value in record.headers
        ],
        "lane": record.lane,
    }
    return json.dumps(fields, ensure_ascii=False)


def _json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data).decode(), f"{name}_encoding": "base64"}


def _text(data: bytes | None) -> str:
    """In quotes when it is text that can be shown, else in base64."""
    if data is None:
        return "null"
    try:
        return json.dumps(data.decode(), ensure_ascii=not data.decode().isprintable())
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(data).decode()}"


def _name(name: str) -> str:
    return name if name.isascii() and name.isprintable() and name else json.dumps(name)


def _printable(name: str) -> str:
    """Header names keep bytes that were not UTF-8 as lone surrogates, which no output takes."""
    return name.encode("utf-8", "replace").decode()


def _time(timestamp: int) -> str:
    try:
        moment = _EPOCH + timedelta(milliseconds=timestamp)
    except OverflowError:
        return f"{timestamp}ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- batches


def _batch_fields(file: str, batch: Batch) -> dict[str, Any]:
    header = batch.header
    return {
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "file": file,
        "position": batch.position,
        "size": header.size,
        "records": header.count,
        "compression": header.compression,
        "leader_epoch": header.leader_epoch,
        "max_timestamp": header.max_timestamp,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "transactional": header.is_transactional,
        "control": header.is_control,
        "lane": header.lane,
        "crc": f"{header.crc:08x}",
    }


def _batch_text(fields: dict[str, Any], header: Header) -> str:
    parts = [
        f"{header.base_offset}-{header.last_offset}",
        f"{fields['file']} at {fields['position']}",
        f"{header.size} bytes",
        "1 record" if header.count == 1 else f"{header.count} records",
        header.compression,
        f"epoch {header.leader_epoch}",
        f"newest {_time(header.max_timestamp)}",
    ]
    if header.producer_id >= 0:
        parts.append(
            f"producer {header.producer_id} epoch {header.producer_epoch} "
            f"sequence {header.base_sequence}-{header.last_sequence}"
        )
    if header.is_transactional:
        parts.append("transactional")
    if header.is_control:
        parts.append("control")
    if header.lane is not None:
        parts.append(f"lane={header.lane}")
    return "  ".join(parts)
