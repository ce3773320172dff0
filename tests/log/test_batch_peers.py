"""Batches that other people's code reads and writes: aiokafka, kafka-python, librdkafka."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiokafka.codec
import kafka.codec
import kafka.record.default_records as kafka_python
import pytest
from aiokafka.record._crecords.default_records import (
    DefaultRecordBatch as AiokafkaBatch,
)
from aiokafka.record._crecords.default_records import (
    DefaultRecordBatchBuilder as AiokafkaBuilder,
)
from hypothesis import given
from hypothesis import strategies as st

from log.batch_twins import Fields, both_twins, numbered, plain, several_fields, some_fields
from log.librdkafka_capture import capture
from millstream.log import batch

BYTES_MAX = 2**20
BUILDER_BYTES_MAX = 2**24

compressions = st.sampled_from(batch.COMPRESSIONS)


@pytest.fixture(scope="module", autouse=True)
def kafka_python_with_all_compressions() -> Iterator[None]:
    """kafka-python wants a package for each compression; lend it aiokafka's codecs instead."""
    patch = pytest.MonkeyPatch()
    for name in ("snappy", "lz4", "zstd"):
        patch.setattr(kafka.codec, f"has_{name}", lambda: True)
        for action in ("encode", "decode"):
            lent = getattr(aiokafka.codec, f"{name}_{action}")
            patch.setattr(kafka_python, f"{name}_{action}", lent)
    yield
    patch.undo()


def by_aiokafka(records: list[Fields], compression: str = "none") -> bytes:
    code = batch.COMPRESSIONS.index(compression)
    builder = AiokafkaBuilder(2, code, 1, 11, 3, 17, BUILDER_BYTES_MAX)
    for index, (timestamp, key, value, headers) in enumerate(records):
        builder.append(index, timestamp, key, value, headers)
    return bytes(builder.build())


def by_kafka_python(records: list[Fields], compression: str = "none") -> bytes:
    builder = kafka_python.DefaultRecordBatchBuilder(
        magic=2,
        compression_type=batch.COMPRESSIONS.index(compression),
        is_transactional=True,
        producer_id=11,
        producer_epoch=3,
        base_sequence=17,
        batch_size=BUILDER_BYTES_MAX,
    )
    for index, (timestamp, key, value, headers) in enumerate(records):
        builder.append(index, timestamp, key, value, headers)
    return bytes(builder.build())


def by_us(twin: Any, records: list[Fields], compression: str = "none") -> Any:
    return twin.encode(
        records,
        compression=compression,
        transactional=True,
        producer_id=11,
        producer_epoch=3,
        base_sequence=17,
    )


@both_twins
@given(several_fields, compressions)
def test_aiokafka_and_kafka_python_read_what_we_write(
    twin: Any, records: list[Fields], compression: str
) -> None:
    data = by_us(twin, records, compression)
    for reader in (AiokafkaBatch, kafka_python.DefaultRecordBatch):
        theirs = reader(data)
        assert theirs.validate_crc()
        assert theirs.is_transactional
        assert (theirs.producer_id, theirs.producer_epoch, theirs.base_sequence) == (11, 3, 17)
        assert plain(theirs) == numbered(records)


@both_twins
@pytest.mark.parametrize("writer", [by_aiokafka, by_kafka_python])
@given(records=several_fields, compression=compressions)
def test_we_read_what_aiokafka_and_kafka_python_write(
    twin: Any, writer: Any, records: list[Fields], compression: str
) -> None:
    data = writer(records, compression)
    header = twin.verify(data, bytes_max=BYTES_MAX)
    assert header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (11, 3, 17)
    assert plain(twin.decode(data, check_crc=True)) == numbered(records)
    assert twin.decode_columns(data).rows == len(records)


@both_twins
@given(several_fields)
def test_uncompressed_we_write_the_very_same_bytes(twin: Any, records: list[Fields]) -> None:
    ours = by_us(twin, records)
    assert ours == by_aiokafka(records)
    # kafka-python writes 0 for a leader epoch that nobody knows, the others -1.
    assert b"".join(batch.placed(ours, 0, 0)) == by_kafka_python(records)


@both_twins
@pytest.mark.parametrize("compression", batch.COMPRESSIONS)
def test_a_batch_of_many_snappy_blocks_is_read_on_both_sides(twin: Any, compression: str) -> None:
    records = some_fields(3000)
    data = by_us(twin, records, compression)
    assert plain(AiokafkaBatch(data)) == numbered(records)
    assert plain(twin.decode(by_aiokafka(records, compression))) == numbered(records)


@pytest.fixture(scope="module")
def captured() -> dict[str, bytes]:
    return {
        compression: capture(
            some_fields(300),
            **{"compression.type": compression, "enable.idempotence": compression == "none"},
        )
        for compression in batch.COMPRESSIONS
    }


@both_twins
@pytest.mark.parametrize("compression", batch.COMPRESSIONS)
def test_we_read_what_librdkafka_writes(
    twin: Any, captured: dict[str, bytes], compression: str
) -> None:
    blob = captured[compression]
    found = twin.scan(blob, 0, 0, exact=True)
    assert (found.end, found.next_offset, found.reason) == (len(blob), 300, "end")
    records = []
    for position, header in found.batches:
        data = blob[position : position + header.size]
        assert twin.verify(data, bytes_max=BYTES_MAX) == header
        assert header.compression == compression
        assert (header.producer_id >= 0) == (compression == "none")
        records += twin.decode(data, check_crc=True)
    assert plain(records) == numbered(some_fields(300))
    assert twin.decode_columns(blob).rows == 300
