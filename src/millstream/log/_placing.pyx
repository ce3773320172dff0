# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Placed batches and their bytes, compiled: the twin of `_placing_pure.py`."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from millstream.log import _batch_layout, _placing_layout
from millstream.log.index import SPAN_MAX as _SPAN_MAX

cdef int64_t SPAN_MAX = _SPAN_MAX

cdef enum:
    # As in the layouts; they are compared below, once, at import.
    PLACE_BYTES = 16
    LENGTH_END = 12
    KEY_BYTES = 21
    HEADER_FIELDS = 13
    HEAD_BYTES = 49

assert len(_batch_layout.Header._fields) == HEADER_FIELDS
assert _batch_layout.PLACE_BYTES == PLACE_BYTES
assert _batch_layout.LENGTH_END == LENGTH_END
assert _placing_layout.ENTRY_KEY.size == KEY_BYTES
assert _placing_layout.ENTRY.size == HEAD_BYTES


@cython.final
@cython.freelist(64)
cdef class Mark:
    """Where a partition stood before a round of appends."""

    def __eq__(self, other):
        if type(other) is not Mark:
            return NotImplemented
        cdef Mark that = other
        return (
            self.next_offset == that.next_offset
            and self.tail == that.tail
            and self.segments == that.segments
            and self.epochs == that.epochs
            and self.undo == that.undo
        )

    __hash__ = None


cdef class End:
    """The end of a partition: what placing batches there, and showing them, has to know."""

    def __init__(self, bytes entry_key not None, settings, int32_t leader_epoch):
        self.entry_key = entry_key
        self.settings = settings
        self.leader_epoch = leader_epoch
        self.segments = []
        self.epochs = []
        self.visible = (None, 0)
        self.undo = []
        self.unapplied = []
        self.changed = True

    cpdef Mark mark(self):
        cdef Mark mark = Mark.__new__(Mark)
        mark.next_offset = self.next_offset
        mark.tail = self.tail
        mark.segments = len(self.segments)
        mark.epochs = len(self.epochs)
        mark.undo = len(self.undo)
        return mark

    cdef int look(self) except -1:
        """See to what is known of the last segment and the settings."""
        segment = self.segments[len(self.segments) - 1]
        if segment is not self.known_segment:
            self.segment_base = segment.base_offset
            self.segment_created_ms = segment.created_ms
            self.known_segment = segment
        settings = self.settings
        if settings is not self.known_settings:
            self.segment_bytes = settings.segment_bytes
            self.segment_age_ms = settings.segment_age_ms
            self.known_settings = settings
        return 0

    cdef bint is_segment_begun(self, Py_ssize_t size, int64_t last_offset_delta, int64_t now_ms):
        return self.tail > 0 and (
            self.tail + size > self.segment_bytes
            or now_ms - self.segment_created_ms >= self.segment_age_ms
            or self.next_offset + last_offset_delta + 1 - self.segment_base > SPAN_MAX
        )

    def begins_segment(self, Py_ssize_t size, int64_t last_offset_delta, int64_t now_ms):
        """Whether a batch has to go to a segment of its own."""
        self.look()
        return self.is_segment_begun(size, last_offset_delta, now_ms)

    cpdef Placed place(self, data, header, int64_t now_ms):
        """Give a batch its offset and place, when that is all it takes; None for one that has a
        sequence, or begins a segment or an epoch, or comes after one that has no room."""
        cdef Py_ssize_t size = len(data), epochs = len(self.epochs)
        if self.is_closed or (self.is_stuck and self.unapplied) or epochs == 0:
            return None
        if not isinstance(header, tuple) or len(header) != HEADER_FIELDS:
            raise TypeError("a batch goes with its header")
        # Fields 9 and 6 of a header: producer id and last offset delta.
        if <int64_t>(<object>PyTuple_GET_ITEM(header, 9)) >= 0:
            return None
        if <int64_t>(<tuple>self.epochs[epochs - 1])[0] != self.leader_epoch:
            return None
        self.look()
        if self.is_segment_begun(size, <int64_t>(<object>PyTuple_GET_ITEM(header, 6)), now_ms):
            return None
        return self.put(data, size, header)

    def reserve_place(self, data, header):
        if not isinstance(header, tuple) or len(header) != HEADER_FIELDS:
            raise TypeError("a batch goes with its header")
        self.look()
        return self.put(data, len(data), header)

    cdef Placed put(self, object data, Py_ssize_t size, object header):
        cdef Placed one = Placed.__new__(Placed)
        one.segment = self.known_segment
        one.segment_base = self.segment_base
        one.position = self.tail
        one.base_offset = self.next_offset
        one.leader_epoch = self.leader_epoch
        one.data = data
        one.size = size
        one.header = header
        one.entry_key = self.entry_key
        # Fields 8 and 6 of a header: newest timestamp and last offset delta.
        one.max_timestamp = <int64_t>(<object>PyTuple_GET_ITEM(header, 8))
        one.next_offset = one.base_offset + <int64_t>(<object>PyTuple_GET_ITEM(header, 6)) + 1
        self.tail += size
        self.next_offset = one.next_offset
        self.changed = True
        return one

    def settle(self):
        """The reservations since the last call are final."""
        self.undo.clear()

    cpdef int advance(self, Placed placed) except -1:
        """Readers may now see this batch and all before it."""
        assert placed.next_offset > self.high_watermark
        self.high_watermark = placed.next_offset
        self.visible = (placed.segment, placed.position + placed.size)
        return 0


@cython.final
@cython.freelist(512)
cdef class Placed:
    """A batch that has been given its place: what goes to the journal and to the segment."""

    def __init__(
        self, segment, int64_t position, int64_t base_offset, *, int32_t leader_epoch, data,
        header, bytes entry_key=b"",
    ):
        self.segment = segment
        self.segment_base = segment.base_offset
        self.position = position
        self.base_offset = base_offset
        self.leader_epoch = leader_epoch
        self.data = data
        self.header = header
        self.size = len(data)
        self.entry_key = entry_key
        self.max_timestamp = header.max_timestamp
        self.next_offset = base_offset + <int64_t>header.last_offset_delta + 1

    def prefix(self):
        """Its first bytes, with offset and epoch as they are here."""
        cdef uint8_t prefix[PLACE_BYTES]
        write_prefix(prefix, self)
        return (<char *>prefix)[:PLACE_BYTES]

    def entry_head(self):
        """What stands before it in the journal."""
        cdef uint8_t head[HEAD_BYTES]
        if PyBytes_GET_SIZE(self.entry_key) != KEY_BYTES:
            raise ValueError("this batch is not for the journal")
        write_head(head, self)
        return (<char *>head)[:HEAD_BYTES]


cdef inline uint8_t *store32(uint8_t *at, uint32_t number) noexcept nogil:
    at[0] = <uint8_t>(number >> 24)
    at[1] = <uint8_t>(number >> 16)
    at[2] = <uint8_t>(number >> 8)
    at[3] = <uint8_t>number
    return at + 4


cdef inline uint8_t *store64(uint8_t *at, int64_t number) noexcept nogil:
    store32(at, <uint32_t>(<uint64_t>number >> 32))
    return store32(at + 4, <uint32_t>number)


cdef inline uint8_t *write_prefix(uint8_t *at, Placed one) noexcept:
    at = store64(at, one.base_offset)
    at = store32(at, <uint32_t>(one.size - LENGTH_END))
    return store32(at, <uint32_t>one.leader_epoch)


cdef inline uint8_t *write_head(uint8_t *at, Placed one) noexcept:
    memcpy(at, PyBytes_AS_STRING(one.entry_key), KEY_BYTES)
    at = store64(at + KEY_BYTES, one.segment_base)
    at = store64(at, one.position)
    at = store64(at, one.base_offset)
    return store32(at, <uint32_t>one.size)


cdef uint8_t *write_bytes(uint8_t *at, object data, Py_ssize_t size, Py_ssize_t skip) except NULL:
    """`size` bytes of a buffer, behind those that are skipped."""
    cdef Py_buffer view
    if PyBytes_CheckExact(data) and size >= 0 and PyBytes_GET_SIZE(data) == size + skip:
        memcpy(at, PyBytes_AS_STRING(data) + skip, size)
        return at + size
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if size < 0 or view.len != size + skip:
            raise ValueError("the buffer has another size than it said")
        memcpy(at, <uint8_t *>view.buf + skip, size)
    finally:
        PyBuffer_Release(&view)
    return at + size


cdef uint8_t *write_batch(uint8_t *at, Placed one) except NULL:
    at = write_prefix(at, one)
    return write_bytes(at, one.data, one.size - PLACE_BYTES, PLACE_BYTES)


def body_bytes(entries):
    """The length of a frame's body."""
    cdef Py_ssize_t total = 0
    for entry in entries:
        if type(entry) is Placed:
            total += HEAD_BYTES + (<Placed>entry).size
        else:
            total += len(entry)
    return total


def joined_entries(entries, Py_ssize_t gap):
    """A frame's body in one piece, behind a gap for the frame's head."""
    cdef Py_ssize_t length = body_bytes(entries)
    cdef object body = PyByteArray_FromStringAndSize(NULL, gap + length)
    cdef uint8_t *at = <uint8_t *>PyByteArray_AS_STRING(body)
    memset(at, 0, gap)
    at += gap
    for entry in entries:
        if type(entry) is Placed:
            if PyBytes_GET_SIZE((<Placed>entry).entry_key) != KEY_BYTES:
                raise ValueError("this batch is not for the journal")
            at = write_head(at, <Placed>entry)
            at = write_batch(at, <Placed>entry)
        else:
            at = write_bytes(at, entry, len(entry), 0)
    return body


def joined_batches(run):
    """The bytes of a segment in one piece."""
    cdef Py_ssize_t length = 0
    cdef Placed one
    for one in run:
        length += one.size
    cdef object body = PyByteArray_FromStringAndSize(NULL, length)
    cdef uint8_t *at = <uint8_t *>PyByteArray_AS_STRING(body)
    for one in run:
        at = write_batch(at, one)
    return body


def next_noted(
    run, Py_ssize_t at, int64_t last_indexed, int64_t index_bytes, int64_t max_timestamp
):
    """The first batch, from `at` on, that an index has to hear of; the end when there is none."""
    cdef Py_ssize_t end = len(run)
    cdef Placed one
    while at < end:
        one = run[at]
        if (
            last_indexed < 0
            or one.position - last_indexed >= index_bytes
            or one.max_timestamp > max_timestamp
        ):
            break
        at += 1
    return at
