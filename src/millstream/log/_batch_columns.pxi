# Part of `_batch.pyx`: batches as columns, in the buffers of Arrow's format.

def decode_columns(
    data,
    *,
    from_offset=None,
    until_offset=None,
    bint check_crc=True,
    inflated_bytes_max=layout.INFLATED_BYTES_MAX,
):
    """Many whole batches, one after the other, as columns; control batches are left out.

    Batches come whole, so records before `from_offset`, or from `until_offset` on, are dropped
    here. `inflated_bytes_max` holds for each batch; all together may have 2^31 - 1 bytes, which
    is what Arrow's offsets can say.
    """
    cdef int64_t lowest = INT64_MIN if from_offset is None else from_offset
    cdef int64_t end = INT64_MAX if until_offset is None else until_offset
    cdef Rows rows = Rows()
    cdef Py_buffer view
    cdef Py_ssize_t position = 0, size
    cdef int64_t inflated_bytes = 0
    cdef Head head
    cdef Opened batch
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if not all_whole(&view):
            pure.whole_batches(data)
            raise AssertionError("the twins do not agree on where batches end")
        rows.value.data.reserve(view.len)
        while position < view.len:
            load(&head, <const uint8_t *>view.buf + position)
            size = <Py_ssize_t>head.length + HEADER_BYTES - LENGTH_MIN
            batch = open_part(
                <uint8_t *>view.buf + position, size, check_crc, lowest, end, inflated_bytes_max
            )
            position += size
            if batch is None:
                continue
            inflated_bytes += batch.end - batch.cursor
            if inflated_bytes > INT32_MAX:
                raise layout.too_large("all records together", INT32_MAX)
            add_rows(rows, batch, lowest, end)
    finally:
        PyBuffer_Release(&view)
    return rows.columns()


cdef bint all_whole(Py_buffer *view) noexcept:
    cdef Py_ssize_t position = 0
    cdef Head head
    while view.len - position >= HEADER_BYTES:
        load(&head, <const uint8_t *>view.buf + position)
        if head.magic != MAGIC or head.length < LENGTH_MIN:
            return False
        position += <Py_ssize_t>head.length + HEADER_BYTES - LENGTH_MIN
    return position == view.len


cdef Opened open_part(
    uint8_t *at,
    Py_ssize_t size,
    bint check_crc,
    int64_t lowest,
    int64_t end,
    object inflated_bytes_max,
):
    """One of many batches, opened; None when it has nothing for a reader of this range."""
    cdef Head head
    cdef object data = PyMemoryView_FromMemory(<char *>at, size, PyBUF_READ)
    load(&head, at)
    if check_crc and checksum(at, &head) != head.crc:
        layout.require_crc(data, layout.read_header(data))
    if head.attributes & CONTROL_MASK:
        return None
    if counts_fit(&head, False):
        if head.base_offset >= end or head.base_offset + head.last_offset_delta < lowest:
            return None
    return open_batch(data, inflated_bytes_max, False)


cdef enum:
    # Records that are read, then copied. Their bytes are still in the nearest cache by then.
    CHUNK = 128


cdef struct Spot:
    const uint8_t *content
    int32_t size  # -1: null


cdef int add_rows(Rows rows, Opened batch, int64_t lowest, int64_t end) except -1:
    cdef int32_t index = 0, stop
    rows.reserve(batch.head.count, batch.end - batch.cursor)
    while index < batch.head.count:
        stop = min(index + CHUNK, batch.head.count)
        add_chunk(rows, batch, index, stop, lowest, end)
        index = stop
    return batch.finish()


cdef int add_chunk(
    Rows rows, Opened batch, int32_t index, int32_t stop, int64_t lowest, int64_t end
) except -1:
    """The loop that Spark waits for.

    It only notes where keys and values lie, and each column takes its own afterwards: with the
    copying in here too it would run out of registers.
    """
    cdef int64_t *offsets = <int64_t *>rows.offset.start + rows.count
    cdef int64_t *timestamps = <int64_t *>rows.timestamp.start + rows.count
    cdef int32_t *header_ends = <int32_t *>rows.header_offsets.start + rows.count + 1
    cdef int32_t headers = <int32_t>rows.header_key.items
    cdef Spot[CHUNK] keys
    cdef Spot[CHUNK] values
    cdef Head head = batch.head
    cdef const uint8_t *at = batch.cursor
    cdef int64_t last_delta = batch.last_delta, offset
    cdef Py_ssize_t row = 0
    cdef int fault
    cdef Parsed record
    while index < stop:
        fault = next_record(at, batch.end, &head, last_delta, &record)
        if fault:
            raise layout.record_fault(fault, index)
        index += 1
        at = record.end
        last_delta = record.offset_delta
        offset = head.base_offset + last_delta
        if not lowest <= offset < end:
            continue
        offsets[row] = offset
        timestamps[row] = record.timestamp
        keys[row].content, keys[row].size = record.key, record.key_bytes
        values[row].content, values[row].size = record.value, record.value_bytes
        if record.header_count:
            headers = rows.add_headers(
                rows.count + row, record.headers, record.end, record.header_count
            )
        header_ends[row] = headers
        row += 1
    batch.cursor, batch.last_delta = at, last_delta
    rows.key.take(keys, row)
    rows.value.take(values, row)
    rows.count += row
    return 0


@cython.final
@cython.no_gc
cdef class Binary:
    """A column of bytes that is being filled."""

    cdef Memory offsets
    cdef Memory data
    cdef Memory validity
    cdef Py_ssize_t items
    cdef Py_ssize_t nulls

    def __cinit__(self):
        cdef int32_t zero = 0
        self.offsets = Memory()
        self.offsets.add(&zero, 4)
        self.data = Memory()
        self.validity = Memory()

    cdef int reserve(self, Py_ssize_t more, Py_ssize_t bytes_more) except -1:
        self.offsets.reserve(4 * more)
        self.data.reserve(bytes_more)
        self.validity.used = (self.items + 7) // 8
        self.validity.reserve((more + 7) // 8)
        return 0

    cdef int add(self, const uint8_t *content, int32_t size) except -1:
        cdef Spot spot
        spot.content, spot.size = content, size
        self.reserve(1, max(size, 0))
        self.take(&spot, 1)
        return 0

    cdef void take(self, const Spot *spots, Py_ssize_t count) noexcept:
        """What lies at these spots; there is room for it, see `reserve`."""
        cdef int32_t *ends = <int32_t *>(self.offsets.start + self.offsets.used)
        cdef uint8_t *data = self.data.start
        cdef Py_ssize_t used = self.data.used, item, nulls = 0
        for item in range(count):
            nulls += spots[item].size < 0
        if nulls == count:
            for item in range(count):
                ends[item] = <int32_t>used
        else:
            for item in range(count):
                if spots[item].size > 0:
                    memcpy(data + used, spots[item].content, spots[item].size)
                    used += spots[item].size
                ends[item] = <int32_t>used
        self.mark(spots, count, nulls)
        self.offsets.used += 4 * count
        self.data.used = used
        self.items += count
        self.nulls += nulls

    cdef void mark(self, const Spot *spots, Py_ssize_t count, Py_ssize_t nulls) noexcept:
        """A bit for each item; whole bytes at once where all items are alike."""
        cdef uint8_t *bits = self.validity.start
        cdef Py_ssize_t item = 0, place, alike
        while item < count:
            place = self.items + item
            alike = (count - item) // 8 if nulls == 0 or nulls == count else 0
            if alike and place & 7 == 0:
                memset(bits + (place >> 3), 0xFF if nulls == 0 else 0, alike)
                item += 8 * alike
                continue
            if place & 7 == 0:
                bits[place >> 3] = 0
            bits[place >> 3] |= (spots[item].size >= 0) << (place & 7)
            item += 1

    cdef object column(self):
        self.validity.used = (self.items + 7) // 8
        return layout.BinaryColumn(
            self.nulls,
            memoryview(self.validity) if self.nulls else None,
            memoryview(self.offsets),
            memoryview(self.data),
        )


@cython.final
@cython.no_gc
cdef class Rows:
    """All columns that are being filled."""

    cdef Py_ssize_t count
    cdef Memory offset
    cdef Memory timestamp
    cdef Binary key
    cdef Binary value
    cdef Memory header_offsets
    cdef Binary header_key
    cdef Binary header_value
    cdef Memory lane
    cdef Memory lane_validity
    cdef Py_ssize_t lanes

    def __cinit__(self):
        cdef int32_t zero = 0
        self.offset, self.timestamp = Memory(), Memory()
        self.key, self.value = Binary(), Binary()
        self.header_offsets = Memory()
        self.header_offsets.add(&zero, 4)
        self.header_key, self.header_value = Binary(), Binary()
        self.lane, self.lane_validity = Memory(), Memory()

    cdef int reserve(self, Py_ssize_t more, Py_ssize_t bytes_more) except -1:
        self.settle()
        self.offset.reserve(8 * more)
        self.timestamp.reserve(8 * more)
        self.key.reserve(more, bytes_more)
        self.value.reserve(more, bytes_more)
        self.header_offsets.reserve(4 * more)
        self.lane.reserve_zeros(more)
        self.lane_validity.reserve_zeros((more + 7) // 8)
        return 0

    cdef void settle(self) noexcept:
        """Rows are written by their number; here the memories learn how far they are used."""
        self.offset.used = self.timestamp.used = 8 * self.count
        self.header_offsets.used = 4 * (self.count + 1)
        self.lane.used = self.count
        self.lane_validity.used = (self.count + 7) // 8

    cdef int32_t add_headers(
        self, Py_ssize_t row, const uint8_t *value, const uint8_t *end, int32_t count
    ) except -1:
        """Takes the record's headers, which start at `value`; answers how many there are by now."""
        cdef const uint8_t *name
        cdef int32_t name_bytes = 0, value_bytes = 0
        cdef int lane = -1
        for _ in range(count):
            name = read_varint(value + max(value_bytes, 0), end, &name_bytes)
            value = read_varint(name + name_bytes, end, &value_bytes)
            self.add_name(name, name_bytes)
            self.header_value.add(value, value_bytes)
            if same(name, name_bytes, LANE_HEADER_RAW):
                lane = lane_of(value, value_bytes)
        if lane >= 0:
            self.lane.start[row] = <uint8_t>lane
            self.lane_validity.start[row >> 3] |= 1 << (row & 7)
            self.lanes += 1
        return <int32_t>self.header_key.items

    cdef int add_name(self, const uint8_t *name, int32_t size) except -1:
        cdef int32_t place
        for place in range(size):
            if name[place] >= 0x80:
                break
        else:
            return self.header_key.add(name, size)
        cdef bytes raw = pure.utf8_name(
            PyUnicode_DecodeUTF8(<const char *>name, size, "surrogateescape")
        )
        # What is replaced grows, so that the sum of the batches is no bound here.
        if self.header_key.data.used + PyBytes_GET_SIZE(raw) > INT32_MAX:
            raise layout.too_large("a column", INT32_MAX)
        return self.header_key.add(
            <const uint8_t *>PyBytes_AS_STRING(raw), <int32_t>PyBytes_GET_SIZE(raw)
        )

    cdef object columns(self):
        self.settle()
        return layout.Columns(
            rows=self.count,
            offset=memoryview(self.offset),
            timestamp=memoryview(self.timestamp),
            key=self.key.column(),
            value=self.value.column(),
            header_offsets=memoryview(self.header_offsets),
            header_count=self.header_key.items,
            header_key=self.header_key.column(),
            header_value=self.header_value.column(),
            lane_nulls=self.count - self.lanes,
            lane_validity=memoryview(self.lane_validity) if self.lanes < self.count else None,
            lane=memoryview(self.lane),
        )


cdef inline bint same(const uint8_t *content, int32_t size, bytes expected) noexcept:
    return (
        size == PyBytes_GET_SIZE(expected)
        and memcmp(content, PyBytes_AS_STRING(expected), size) == 0
    )


cdef int lane_of(const uint8_t *name, int32_t size) except -2:
    cdef int index
    for index in range(len(LANES_RAW)):
        if same(name, size, LANES_RAW[index]):
            return index
    return -1
