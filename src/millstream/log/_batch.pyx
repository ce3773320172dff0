# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The batch codec, compiled: the twin of `_batch_pure.py`, which has the layout of a record.

Three rules keep it short and safe. Whatever is wrong with a header is told by the pure twin: here
it is only noticed, and the same bytes are handed over for the error. A record is checked to its
last byte by `next_record` before anything reads it, so those who follow need no bounds of their
own. And memory grows with bytes that are there, never with a count that somebody wrote.

It is one module in four files: reading the bytes is in `_batch_reading.pxi`, columns are read in
`_batch_columns.pxi` and written in `_batch_writing.pxi`.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_READ, PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from cpython.type cimport PyType_GenericAlloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, INT64_MIN, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
)
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from crc32c import crc32c as _crc32c

from millstream.errors import BatchCountInvalid
from millstream.log import _batch_layout as layout
from millstream.log import _batch_pure as pure
from millstream.log._batch_compression import compress, decompress

cdef enum:
    # As in `_batch_layout.py`; they are compared below, once, at import.
    HEADER_BYTES = 61
    LENGTH_MIN = 49
    CRC_START = 21
    MAGIC = 2
    COMPRESSION_MASK = 0x07
    COMPRESSION_LAST = 4
    APPEND_TIME_MASK = 0x08
    CONTROL_MASK = 0x20
    RECORD_BYTES_MIN = 7
    CRC_BY_TABLE_BYTES_MAX = 512
    FAULT_VARINT = 1
    FAULT_LENGTH = 2
    FAULT_OFFSET = 3
    FAULT_TIMESTAMP = 4
    FAULT_SLACK = 5
    FAULT_TRAILING = 6
    FAULT_COUNT = 7

for _name, _value in {
    "HEADER_BYTES": HEADER_BYTES, "LENGTH_MIN": LENGTH_MIN, "CRC_START": CRC_START,
    "MAGIC": MAGIC, "COMPRESSION_MASK": COMPRESSION_MASK, "APPEND_TIME_MASK": APPEND_TIME_MASK,
    "CONTROL_MASK": CONTROL_MASK, "RECORD_BYTES_MIN": RECORD_BYTES_MIN,
    "FAULT_VARINT": FAULT_VARINT, "FAULT_LENGTH": FAULT_LENGTH, "FAULT_OFFSET": FAULT_OFFSET,
    "FAULT_TIMESTAMP": FAULT_TIMESTAMP, "FAULT_SLACK": FAULT_SLACK,
    "FAULT_TRAILING": FAULT_TRAILING, "FAULT_COUNT": FAULT_COUNT,
}.items():
    assert getattr(layout, _name) == _value, _name

cdef uint32_t MURMUR2_SEED = pure.MURMUR2_SEED
cdef uint32_t MURMUR2_M = pure.MURMUR2_M
cdef int64_t BODY_BYTES_MAX = layout.BODY_BYTES_MAX
cdef int64_t INFLATED_BYTES_MAX = layout.INFLATED_BYTES_MAX
cdef object Header = layout.Header
cdef object new_tuple = tuple.__new__
cdef str LANE_HEADER = layout.LANE_HEADER
cdef bytes LANE_HEADER_RAW = layout.LANE_HEADER.encode()
cdef tuple LANES = layout.LANES
cdef tuple LANES_RAW = tuple([_name.encode() for _name in layout.LANES])


# ---- records


@cython.final
@cython.no_gc  # bytes and strings form no cycles, and the collector costs more than the decoding
@cython.freelist(1024)
cdef class Record:
    """One message, with its place in its partition."""

    cdef readonly int64_t offset
    cdef readonly int64_t timestamp
    cdef readonly bytes key
    cdef readonly bytes value
    cdef readonly tuple headers

    def __init__(self, offset, timestamp, bytes key=None, bytes value=None, tuple headers=()):
        self.offset = offset
        self.timestamp = timestamp
        self.key = key
        self.value = value
        self.headers = headers

    @property
    def lane(self):
        """What the last `ms-lane` header says; None without one, or when it names no lane."""
        for name, value in reversed(self.headers):
            if name == LANE_HEADER:
                return LANES[LANES_RAW.index(value)] if value in LANES_RAW else None
        return None

    def __eq__(self, other):
        if type(other) is not Record:
            return NotImplemented
        cdef Record that = other
        return (
            self.offset == that.offset
            and self.timestamp == that.timestamp
            and self.key == that.key
            and self.value == that.value
            and self.headers == that.headers
        )

    def __hash__(self):
        return hash((self.offset, self.timestamp, self.key, self.value, self.headers))

    def __repr__(self):
        return (
            f"Record(offset={self.offset!r}, timestamp={self.timestamp!r}, key={self.key!r}, "
            f"value={self.value!r}, headers={self.headers!r})"
        )

    def __reduce__(self):
        return Record, (self.offset, self.timestamp, self.key, self.value, self.headers)


include "_batch_reading.pxi"
include "_batch_columns.pxi"
include "_batch_writing.pxi"


# ---- checking


def verify(data, *, bytes_max, bint exact_count=True):
    """Check one batch from outside: length, size, magic, CRC, counts. Nothing is opened.

    `exact_count` wants a record for every offset, as producers write them; without it gaps
    are fine, as compaction leaves them.
    """
    cdef Py_buffer view
    cdef Head head
    cdef bint good = False
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if HEADER_BYTES <= view.len <= bytes_max:
            load(&head, <uint8_t *>view.buf)
            if (
                head.magic == MAGIC
                and head.length >= LENGTH_MIN
                and <int64_t>head.length + HEADER_BYTES - LENGTH_MIN == view.len
            ):
                good = sound(&head, <uint8_t *>view.buf, exact_count)
    finally:
        PyBuffer_Release(&view)
    if good:
        return header_of(&head)
    return pure.verify(data, bytes_max=bytes_max, exact_count=exact_count)


def examine(data, *, bytes_max, inflated_bytes_max=layout.INFLATED_BYTES_MAX):
    """As `verify`, and then from inside too: decompressed, each record checked to its last byte.

    What passes can be decoded by anybody. Nothing of it is kept.
    """
    header = verify(data, bytes_max=bytes_max)
    cdef Opened batch = open_batch(data, inflated_bytes_max, False)
    cdef Parsed record
    cdef int32_t index
    for index in range(batch.head.count):
        batch.next(&record, index)
    batch.finish()
    return header


def scan(data, Py_ssize_t position, int64_t next_offset, *, bint exact):
    """Follow batches from `position` on for as long as each is whole, right and in order.

    `exact` wants each to start where the last ended, and a record for every offset; without
    it offsets only have to rise, as in a compacted segment.
    """
    cdef Py_buffer view
    cdef Head head
    cdef const uint8_t *at
    cdef Py_ssize_t size
    cdef list batches = []
    reason = "end"
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while position < view.len:
            if view.len - position < HEADER_BYTES:
                reason = "partial"
                break
            at = <uint8_t *>view.buf + position
            load(&head, at)
            if head.magic != MAGIC or head.length < LENGTH_MIN:
                reason = "invalid"
                break
            size = <Py_ssize_t>head.length + HEADER_BYTES - LENGTH_MIN
            if size > view.len - position:
                reason = "partial"
                break
            if head.base_offset < next_offset or (exact and head.base_offset != next_offset):
                reason = "invalid"
                break
            if not sound(&head, at, exact):
                reason = "invalid"
                break
            batches.append((position, header_of(&head)))
            position += size
            next_offset = head.base_offset + head.last_offset_delta + 1
    finally:
        PyBuffer_Release(&view)
    return layout.Scan(position, next_offset, batches, reason)


# ---- writing


def encode(
    records,
    *,
    base_offset=0,
    leader_epoch=-1,
    compression="none",
    producer_id=-1,
    producer_epoch=-1,
    base_sequence=-1,
    transactional=False,
    control=False,
    append_time=None,
    lane=None,
):
    """One batch of these records, at the offsets from `base_offset` on.

    A Record's own offset is not looked at. `append_time` takes the place of every timestamp.
    `lane` is the hint in the attributes: the records must have it in their headers too.
    """
    # As nearly all are: nothing in the header that C has to ask Python for.
    cdef bint plain = (
        compression == "none" and base_offset == 0 and leader_epoch == -1 and producer_id == -1
        and producer_epoch == -1 and base_sequence == -1 and not transactional and not control
        and append_time is None and lane is None
    )
    cdef int attributes = 0 if plain else layout.attributes_of(
        compression=compression,
        transactional=transactional,
        control=control,
        append_time=append_time is not None,
        lane=lane,
    )
    cdef Memory out = Memory()
    cdef Memory headers_out = Memory()
    cdef Py_ssize_t index = 0, header_count
    cdef int64_t timestamp, base_timestamp = 0, max_timestamp = INT64_MIN
    cdef object when, key, value, headers
    for record in records:
        if type(record) is Record:
            when, key = (<Record>record).timestamp, (<Record>record).key
            value, headers = (<Record>record).value, (<Record>record).headers
        else:
            when, key, value, headers = record
        timestamp = timestamp_of(when if append_time is None else append_time, index)
        if index == 0:
            base_timestamp = timestamp
        elif (timestamp < 0) != (base_timestamp < 0):
            layout.timestamp_of(<object>timestamp - <object>base_timestamp, index)
        max_timestamp = max(max_timestamp, timestamp)
        header_count = len(headers)
        if header_count:
            write_headers(headers_out, headers, index)
        write_record(
            out,
            index,
            timestamp - base_timestamp,
            bytes_of(key),
            bytes_of(value),
            headers_out if header_count else None,
        )
        index += 1
    if index == 0:
        raise BatchCountInvalid("a batch needs at least one record")
    if plain:
        return plain_batch(out, index, base_timestamp, max_timestamp)
    header = new_tuple(Header, (
        base_offset, 0, leader_epoch, MAGIC, 0, attributes, index - 1, base_timestamp,
        max_timestamp, producer_id, producer_epoch, base_sequence, index,
    ))
    code = attributes & COMPRESSION_MASK
    return layout.sealed(header, compress(code, memoryview(out)) if code else memoryview(out))


cdef bytes plain_batch(Memory out, Py_ssize_t count, int64_t base_time, int64_t max_time):
    """The records with a header that has nothing but their number and times; as
    `layout.sealed`, which takes longer than a record."""
    cdef Py_ssize_t size = out.used
    if size > BODY_BYTES_MAX:
        raise layout.too_large("the batch", BODY_BYTES_MAX)
    cdef bytes batch = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + size)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(batch)
    # No producer, no epoch: all ones.
    memset(at, 0xFF, HEADER_BYTES)
    store64(at, 0)
    store32(at + 8, <uint32_t>(LENGTH_MIN + size))
    at[16] = MAGIC
    at[21] = at[22] = 0
    store32(at + 23, <uint32_t>(count - 1))
    store64(at + 27, base_time)
    store64(at + 35, max_time)
    store32(at + 57, <uint32_t>count)
    memcpy(at + HEADER_BYTES, out.start, size)
    store32(at + 17, crc_of(at + CRC_START, HEADER_BYTES - CRC_START + size))
    return batch


def retain(data, keep, *, inflated_bytes_max=layout.INFLATED_BYTES_MAX):
    """The batch with only the records at these offsets; None when there is none of them.

    The offsets that it spans stay the same, and so do all else but the count and the newest
    timestamp: a gap is what tells a reader that compaction was here.
    """
    cdef Opened batch = open_batch(data, inflated_bytes_max, False)
    cdef Memory out = Memory()
    cdef Parsed record
    cdef int32_t index, count = 0
    cdef int64_t newest = INT64_MIN
    for index in range(batch.head.count):
        batch.next(&record, index)
        if batch.head.base_offset + record.offset_delta in keep:
            out.add(record.start, record.end - record.start)
            newest = max(newest, record.timestamp)
            count += 1
    batch.finish()
    if count == 0:
        return None
    if count == batch.head.count:
        return bytes(data)
    header = header_of(&batch.head)._replace(count=count, max_timestamp=newest)
    code = batch.head.attributes & COMPRESSION_MASK
    return layout.sealed(header, compress(code, memoryview(out)) if code else memoryview(out))


cdef inline uint8_t *write_varint(uint8_t *at, int64_t number) noexcept nogil:
    cdef uint64_t rest = (<uint64_t>number << 1) ^ <uint64_t>(number >> 63)
    while rest > 0x7F:
        at[0] = <uint8_t>(rest | 0x80)
        at += 1
        rest >>= 7
    at[0] = <uint8_t>rest
    return at + 1


cdef inline Py_ssize_t varint_bytes(int64_t number) noexcept nogil:
    cdef uint64_t rest = (<uint64_t>number << 1) ^ <uint64_t>(number >> 63)
    cdef Py_ssize_t size = 1
    while rest > 0x7F:
        size += 1
        rest >>= 7
    return size


cdef inline int64_t timestamp_of(object number, Py_ssize_t index) except? -1:
    cdef int overflow = 0
    cdef int64_t result
    if type(number) is int:
        result = PyLong_AsLongLongAndOverflow(number, &overflow)
        if not overflow:
            return result
    return layout.timestamp_of(number, index)


cdef inline bytes bytes_of(object content):
    if content is None or type(content) is bytes:
        return content
    return bytes(memoryview(content))


cdef int write_headers(Memory out, object headers, Py_ssize_t index) except -1:
    cdef bytes raw
    out.used = 0
    out.add_varint(len(headers))
    for name, content in headers:
        raw = layout.header_name_bytes(name, index)
        out.add_varint(PyBytes_GET_SIZE(raw))
        out.add(PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))
        raw = bytes_of(content)
        if raw is None:
            out.add_varint(-1)
        else:
            out.add_varint(PyBytes_GET_SIZE(raw))
            out.add(PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))
    return 0


cdef inline uint8_t *write_bytes(uint8_t *at, bytes content, Py_ssize_t size) noexcept:
    at = write_varint(at, size)
    if size > 0:
        memcpy(at, PyBytes_AS_STRING(content), size)
        at += size
    return at


cdef int write_record(
    Memory out, Py_ssize_t index, int64_t delta, bytes key, bytes value, Memory headers
) except -1:
    cdef Py_ssize_t key_bytes = -1 if key is None else PyBytes_GET_SIZE(key)
    cdef Py_ssize_t value_bytes = -1 if value is None else PyBytes_GET_SIZE(value)
    cdef Py_ssize_t header_bytes = 1 if headers is None else headers.used
    cdef Py_ssize_t length = (
        1
        + varint_bytes(delta)
        + varint_bytes(index)
        + varint_bytes(key_bytes)
        + max(key_bytes, 0)
        + varint_bytes(value_bytes)
        + max(value_bytes, 0)
        + header_bytes
    )
    if length + 5 > BODY_BYTES_MAX - out.used:
        raise layout.too_large("the batch", BODY_BYTES_MAX)
    out.reserve(length + 5)
    cdef uint8_t *at = write_varint(out.start + out.used, length)
    at[0] = 0
    at = write_varint(at + 1, delta)
    at = write_varint(at, index)
    at = write_bytes(at, key, key_bytes)
    at = write_bytes(at, value, value_bytes)
    if headers is None:
        at[0] = 0
        at += 1
    else:
        memcpy(at, headers.start, header_bytes)
        at += header_bytes
    out.used = at - out.start
    return 0


# ---- reading


def decode(data, *, bint check_crc=False, inflated_bytes_max=layout.INFLATED_BYTES_MAX):
    """The records of one batch, each checked to the last byte."""
    cdef Opened batch = open_batch(data, inflated_bytes_max, check_crc)
    cdef Parsed parsed
    cdef Record record
    cdef int32_t index
    cdef list records = PyList_New(batch.head.count)
    for index in range(batch.head.count):
        batch.next(&parsed, index)
        record = Record.__new__(Record)
        record.offset = batch.head.base_offset + parsed.offset_delta
        record.timestamp = parsed.timestamp
        if parsed.key_bytes >= 0:
            record.key = to_bytes(parsed.key, parsed.key_bytes)
        if parsed.value_bytes >= 0:
            record.value = to_bytes(parsed.value, parsed.value_bytes)
        record.headers = headers_of(&parsed) if parsed.header_count else ()
        Py_INCREF(record)
        PyList_SET_ITEM(records, index, record)
    batch.finish()
    return records


def keys(data, *, inflated_bytes_max=layout.INFLATED_BYTES_MAX):
    """Offset, key, and whether the value is missing, of each record: what compaction asks."""
    cdef Opened batch = open_batch(data, inflated_bytes_max, False)
    cdef Parsed record
    cdef int32_t index
    cdef list found = []
    for index in range(batch.head.count):
        batch.next(&record, index)
        found.append((
            batch.head.base_offset + record.offset_delta,
            to_bytes(record.key, record.key_bytes),
            record.value_bytes < 0,
        ))
    batch.finish()
    return found


cdef inline bytes to_bytes(const uint8_t *content, int32_t size):
    if size < 0:
        return None
    return PyBytes_FromStringAndSize(<const char *>content, size)


cdef tuple headers_of(Parsed *record):
    cdef list headers = []
    cdef const uint8_t *at = record.headers
    cdef int32_t size = 0
    for _ in range(record.header_count):
        at = read_varint(at, record.end, &size)
        name = PyUnicode_DecodeUTF8(<const char *>at, size, "surrogateescape")
        at = read_varint(at + size, record.end, &size)
        headers.append((name, to_bytes(at, size)))
        at += max(size, 0)
    return tuple(headers)
