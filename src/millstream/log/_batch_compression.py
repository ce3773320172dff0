"""The five compressions of a batch's records, none of which can blow up the memory.

What a body grows to is not known before, and what its frame says may be a lie. So it is
decompressed into a buffer that has the size of the limit at most, and that running out is the
sign of a bomb. Snappy comes in two forms, as Kafka's clients write it: raw (librdkafka), and in
the framing of the Java library xerial:

    8 bytes   0x82 'SNAPPY' 0
    4 + 4     version, oldest compatible version: not looked at, some clients write them wrong
    then      4 bytes of length and so many bytes of raw snappy, again and again
"""

from __future__ import annotations

from typing import Any

import cramjam

from millstream.errors import BatchCompressionInvalid
from millstream.log._batch_layout import (
    COMPRESSION_MASK,
    HEADER_BYTES,
    Data,
    Header,
    sealed,
    too_large,
)

GZIP, SNAPPY, LZ4, ZSTD = range(1, 5)

_GZIP_LEVEL = 6
_LZ4_LEVEL = 1  # higher ones search longer; who wants ratio takes zstd
_ZSTD_LEVEL = 3
_INTO = {
    GZIP: cramjam.gzip.decompress_into,
    LZ4: cramjam.lz4.decompress_into,
    ZSTD: cramjam.zstd.decompress_into,
}

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_START = _XERIAL_MAGIC + b"\x00\x00\x00\x01" * 2
_XERIAL_BLOCK_BYTES = 32 * 1024

# A first guess at how far a body grows, and how much larger the next one is when it was wrong. The
# limit at once would be megabytes of zeros for every small batch that shrank well.
_GROWTH_GUESS = 8
_GUESS_BYTES_MIN = 16 * 1024
# What a full output buffer looks like; the library has no type of its own for it.
_FULL = "failed to write whole buffer"


def compress(code: int, body: Data) -> bytes:
    """The body as the compression with this code writes it."""
    if code == GZIP:
        return bytes(cramjam.gzip.compress(body, level=_GZIP_LEVEL))
    if code == SNAPPY:
        return _compress_xerial(body)
    if code == LZ4:
        # Kafka's readers know no blocks that depend on each other.
        stream = cramjam.lz4.Compressor(
            level=_LZ4_LEVEL, content_checksum=False, block_linked=False
        )
        stream.compress(bytes(body))
        return bytes(stream.finish())
    if code == ZSTD:
        return bytes(cramjam.zstd.compress(body, level=_ZSTD_LEVEL))
    raise BatchCompressionInvalid(f"there is no compression with the code {code}")


def opened(data: bytes, header: Header, inflated_bytes_max: int) -> bytes:
    """The batch without compression, for who looks at its records more than once."""
    code = header.attributes & COMPRESSION_MASK
    if not code:
        return data
    body = decompress(code, memoryview(data)[HEADER_BYTES:], inflated_bytes_max)
    return sealed(header._replace(attributes=header.attributes - code), body)


def decompress(code: int, body: Data, bytes_max: int) -> Data:
    """The body as it was; BatchTooLarge when it grows past `bytes_max`."""
    try:
        if code == SNAPPY:
            return _decompress_snappy(memoryview(body), bytes_max)
        into = _INTO.get(code)
        if into is None:
            raise BatchCompressionInvalid(f"there is no compression with the code {code}")
        size = min(bytes_max, max(_GUESS_BYTES_MIN, len(body) * _GROWTH_GUESS))
        inflated = _decompress_into(into, body, size)
        while inflated is None and size < bytes_max:
            size = min(bytes_max, size * _GROWTH_GUESS)
            inflated = _decompress_into(into, body, size)
    except cramjam.DecompressionError as error:
        raise BatchCompressionInvalid(f"the records do not decompress: {error}") from None
    if inflated is None:
        raise too_large("the decompressed batch", bytes_max)
    return inflated


def _decompress_into(into: Any, body: Data, size: int) -> Data | None:
    """None when `size` bytes are not enough."""
    buffer = bytearray(size)
    try:
        used = into(body, buffer)
    except cramjam.DecompressionError as error:
        if _FULL in str(error):
            return None
        raise
    return memoryview(buffer)[:used]


def _decompress_snappy(body: memoryview, bytes_max: int) -> Data:
    if body[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        return _decompress_block(body, 0, bytes_max)
    inflated = bytearray()
    position = len(_XERIAL_START)
    while position < len(body):
        start = position + 4
        position = start + int.from_bytes(body[start - 4 : start], "big")
        if start > len(body) or position > len(body):
            raise BatchCompressionInvalid("a snappy block reaches past the end of the batch")
        inflated += _decompress_block(body[start:position], len(inflated), bytes_max)
    return inflated


def _decompress_block(block: memoryview, inflated_bytes: int, bytes_max: int) -> memoryview:
    # The length stands first and the library holds the block to it.
    if inflated_bytes + cramjam.snappy.decompress_raw_len(block) > bytes_max:
        raise too_large("the decompressed batch", bytes_max)
    return memoryview(cramjam.snappy.decompress_raw(block))


def _compress_xerial(body: Data) -> bytes:
    view = memoryview(body)
    parts = [_XERIAL_START]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (len(block).to_bytes(4, "big"), block)
    return b"".join(parts)
