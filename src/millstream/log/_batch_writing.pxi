# Part of `_batch.pyx`: columns in Arrow's buffers written as batches, and hashed.

cdef enum:
    WRITE_DONE = 0
    WRITE_FULL = 1  # the batch has no room for the next row
    WRITE_LARGE = 2  # the memory has none for this one, the first of its batch
    WRITE_TIME = 3
    WRITE_CELL = 4


cdef struct Cells:
    const uint8_t *validity  # NULL: nothing is null
    const int32_t *offsets
    const uint8_t *data
    int64_t data_bytes


cdef struct Table:
    const int64_t *timestamps
    Cells key
    Cells value
    const int32_t *header_offsets  # NULL: there are none
    int64_t header_count
    Cells header_key
    Cells header_value


cdef struct Writing:
    # A batch that is being filled.
    uint8_t *start
    int64_t capacity
    int64_t body_bytes_max
    int64_t used
    int32_t count
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t wanted  # for WRITE_LARGE: what the row takes


@cython.final
cdef class Buffers:
    """Columns whose memory is held while it is read."""

    cdef list views
    cdef Table table

    def __cinit__(self):
        self.views = []

    cdef const uint8_t *hold(self, object data, int64_t bytes_min) except? NULL:
        if data is None:
            return NULL
        view = memoryview(data).cast("B")
        if view.nbytes < bytes_min:
            raise layout.column_short(view.nbytes, bytes_min)
        self.views.append(view)
        cdef Py_buffer buffer
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        # The list holds the view, and that the memory.
        cdef const uint8_t *start = <const uint8_t *>buffer.buf
        PyBuffer_Release(&buffer)
        return start

    cdef int take(self, Cells *cells, object column, int64_t items) except -1:
        data = memoryview(column.data).cast("B")
        cells.validity = self.hold(column.validity, (items + 7) // 8)
        cells.offsets = <const int32_t *>self.hold(column.offsets, 4 * (items + 1))
        cells.data = self.hold(data, 0)
        cells.data_bytes = len(data)
        return 0

    cdef int take_all(self, object columns) except -1:
        cdef int64_t rows = columns.rows
        self.table.timestamps = <const int64_t *>self.hold(columns.timestamp, 8 * rows)
        self.take(&self.table.key, columns.key, rows)
        self.take(&self.table.value, columns.value, rows)
        self.table.header_offsets = NULL
        self.table.header_count = 0
        if columns.header_offsets is not None and rows:
            self.table.header_offsets = <const int32_t *>self.hold(
                columns.header_offsets, 4 * (rows + 1)
            )
            self.table.header_count = columns.header_count
            self.take(&self.table.header_key, columns.header_key, columns.header_count)
            self.take(&self.table.header_value, columns.header_value, columns.header_count)
        return 0


def encode_columns(columns, groups, *, lanes, int64_t batch_bytes, compression="none"):
    """Batches of at most so many bytes, before they are compressed, for each of several groups.

    Row i goes to the group `groups[i]` (int32), in order; to none when that is negative. Group g
    is of the lane `lanes[g]`, which its records then have as their last header. A record that is
    larger than a batch gets one of its own.
    """
    cdef Buffers held = Buffers()
    cdef int64_t rows = columns.rows
    held.take_all(columns)
    cdef const int32_t *group_of = <const int32_t *>held.hold(groups, 4 * rows)
    cdef int32_t group_count = len(lanes)
    cdef Memory order = Memory()
    cdef Memory ends = Memory()
    sort_rows(group_of, rows, group_count, order, ends)
    cdef int64_t at = 0, end
    cdef int32_t group
    cdef Memory body = Memory()
    # All of a batch, so that its first row alone can be too large for it.
    body.reserve(max(batch_bytes, HEADER_BYTES))
    found = []
    for group in range(group_count):
        end = (<int64_t *>ends.start)[group]
        found.append(write_group(
            &held.table, <const int32_t *>order.start + at, end - at, body, batch_bytes,
            compression, lanes[group],
        ))
        at = end
    return found


cdef int sort_rows(
    const int32_t *group_of, int64_t rows, int32_t group_count, Memory order, Memory ends
) except -1:
    """Row numbers, group by group, and where each group ends among them."""
    cdef int64_t row, total = 0, count
    cdef int32_t group
    ends.reserve_zeros(8 * (<int64_t>group_count + 1))
    order.reserve(4 * rows + 4)
    cdef int64_t *places = <int64_t *>ends.start
    cdef int32_t *ordered = <int32_t *>order.start
    memset(places, 0, 8 * (<int64_t>group_count + 1))
    for row in range(rows):
        if group_of[row] >= group_count:
            raise layout.group_unknown(group_of[row], row)
        if group_of[row] >= 0:
            places[group_of[row]] += 1
    for group in range(group_count):
        count = places[group]
        places[group] = total
        total += count
    for row in range(rows):
        group = group_of[row]
        if group >= 0:
            ordered[places[group]] = <int32_t>row
            places[group] += 1
    return 0


cdef list write_group(
    Table *table,
    const int32_t *order,
    int64_t count,
    Memory body,
    int64_t batch_bytes,
    object compression,
    object lane,
):
    cdef bytes lane_header = b"" if lane is None else lane_header_bytes(lane)
    cdef int attributes = layout.attributes_of(
        compression=compression, transactional=False, control=False, append_time=False, lane=lane
    )
    cdef int code = attributes & COMPRESSION_MASK
    cdef const uint8_t *extra = <const uint8_t *>PyBytes_AS_STRING(lane_header)
    cdef int64_t extra_bytes = len(lane_header)
    cdef Writing writing
    cdef int64_t at = 0
    cdef int state
    writing.body_bytes_max = max(batch_bytes, HEADER_BYTES) - HEADER_BYTES
    writing.wanted = 0
    batches = []
    while at < count:
        writing.start = body.start
        writing.capacity = body.capacity
        with nogil:
            at = write_rows(table, order, at, count, extra, extra_bytes, &writing, &state)
        if state == WRITE_LARGE:
            if writing.wanted > BODY_BYTES_MAX:
                raise layout.too_large("the batch", BODY_BYTES_MAX)
            body.used = 0
            body.reserve(writing.wanted)
            continue
        if state == WRITE_TIME:
            raise layout.record_fault(FAULT_TIMESTAMP, order[at])
        if state == WRITE_CELL:
            raise layout.cell_outside(order[at])
        body.used = writing.used
        if code == 0 and lane is None:
            batches.append(plain_batch(
                body, writing.count, writing.base_timestamp, writing.max_timestamp
            ))
            continue
        header = new_tuple(Header, (
            0, 0, -1, MAGIC, 0, attributes, writing.count - 1, writing.base_timestamp,
            writing.max_timestamp, -1, -1, -1, writing.count,
        ))
        written = PyMemoryView_FromMemory(<char *>body.start, body.used, PyBUF_READ)
        batches.append(layout.sealed(header, compress(code, written) if code else written))
    return batches


cdef bytes lane_header_bytes(str lane):
    """The header that names a lane, as it stands in a record; both lengths are one byte."""
    cdef bytes value = lane.encode()
    return (
        bytes((2 * len(LANE_HEADER_RAW),)) + LANE_HEADER_RAW + bytes((2 * len(value),)) + value
    )


cdef int64_t write_rows(
    Table *table,
    const int32_t *order,
    int64_t at,
    int64_t count,
    const uint8_t *extra,
    int64_t extra_bytes,
    Writing *writing,
    int *state,
) noexcept nogil:
    """Fill one batch with rows from `at` on; answers the row at which it stopped."""
    cdef uint8_t *to
    cdef int64_t row, timestamp, delta, length, whole, key_bytes, value_bytes, header_bytes
    cdef int64_t first_header = 0, headers
    writing.used = 0
    writing.count = 0
    state[0] = WRITE_DONE
    while at < count:
        row = order[at]
        timestamp = table.timestamps[row]
        if writing.count == 0:
            writing.base_timestamp = writing.max_timestamp = timestamp
        elif (timestamp < 0) != (writing.base_timestamp < 0) and not fits64(
            timestamp, writing.base_timestamp
        ):
            state[0] = WRITE_TIME
            return at
        delta = timestamp - writing.base_timestamp
        key_bytes = cell_bytes(&table.key, row)
        value_bytes = cell_bytes(&table.value, row)
        headers = 0
        header_bytes = 0
        if table.header_offsets is not NULL:
            first_header = table.header_offsets[row]
            headers = table.header_offsets[row + 1] - first_header
            header_bytes = headers_bytes(table, first_header, headers)
        if key_bytes < -1 or value_bytes < -1 or header_bytes < 0:
            state[0] = WRITE_CELL
            return at
        length = (
            1 + varint_bytes(delta) + varint_bytes(writing.count)
            + varint_bytes(key_bytes) + max(key_bytes, 0)
            + varint_bytes(value_bytes) + max(value_bytes, 0)
            + varint_bytes(headers + (extra_bytes > 0)) + header_bytes + extra_bytes
        )
        whole = writing.used + varint_bytes(length) + length
        if writing.count and whole > writing.body_bytes_max:
            state[0] = WRITE_FULL
            return at
        if whole > writing.capacity:
            state[0] = WRITE_LARGE
            writing.wanted = whole
            return at
        to = write_varint(writing.start + writing.used, length)
        to[0] = 0
        to = write_varint(to + 1, delta)
        to = write_varint(to, writing.count)
        to = write_cell(to, &table.key, row, key_bytes)
        to = write_cell(to, &table.value, row, value_bytes)
        to = write_varint(to, headers + (extra_bytes > 0))
        if headers:
            to = write_header_cells(to, table, first_header, headers)
        if extra_bytes:
            memcpy(to, extra, extra_bytes)
            to += extra_bytes
        writing.used = to - writing.start
        writing.count += 1
        if timestamp > writing.max_timestamp:
            writing.max_timestamp = timestamp
        at += 1
    return at


cdef inline bint fits64(int64_t number, int64_t base) noexcept nogil:
    """Whether their difference does; they are of different signs."""
    cdef int64_t delta = <int64_t>(<uint64_t>number - <uint64_t>base)
    return (delta < 0) == (number < 0)


cdef inline int64_t cell_bytes(const Cells *cells, int64_t row) noexcept nogil:
    """-1: null; less: the offsets are wrong."""
    cdef int64_t start, end
    if cells.validity is not NULL and not (cells.validity[row >> 3] >> (row & 7)) & 1:
        return -1
    start, end = cells.offsets[row], cells.offsets[row + 1]
    if start < 0 or end < start or end > cells.data_bytes:
        return -2
    return end - start


cdef inline uint8_t *write_cell(
    uint8_t *to, const Cells *cells, int64_t row, int64_t size
) noexcept nogil:
    to = write_varint(to, size)
    if size > 0:
        memcpy(to, cells.data + cells.offsets[row], size)
        to += size
    return to


cdef int64_t headers_bytes(const Table *table, int64_t first, int64_t count) noexcept nogil:
    """Of so many headers without their number; negative when something is wrong."""
    cdef int64_t at, name_bytes, value_bytes, total = 0
    if first < 0 or count < 0 or first + count > table.header_count:
        return -1
    for at in range(first, first + count):
        name_bytes = cell_bytes(&table.header_key, at)
        value_bytes = cell_bytes(&table.header_value, at)
        if name_bytes < 0 or value_bytes < -1:
            return -1
        total += varint_bytes(name_bytes) + name_bytes
        total += varint_bytes(value_bytes) + max(value_bytes, 0)
    return total


cdef uint8_t *write_header_cells(
    uint8_t *to, const Table *table, int64_t first, int64_t count
) noexcept nogil:
    cdef int64_t at
    for at in range(first, first + count):
        to = write_cell(to, &table.header_key, at, cell_bytes(&table.header_key, at))
        to = write_cell(to, &table.header_value, at, cell_bytes(&table.header_value, at))
    return to


# ---- keys


def key_partitions(
    keys, int64_t rows, int32_t partitions, *, partitioner="murmur2", int64_t first=0,
    int64_t run=1,
):
    """The partition of each key, as int32. Rows without a key go to one partition after the
    other, `run` of them to each, from the partition `first` on."""
    layout.require_partitioner(partitioner, partitions, run)
    cdef bint by_murmur2 = partitioner == "murmur2"
    cdef Buffers held = Buffers()
    cdef Cells cells
    held.take(&cells, keys, rows)
    cdef Memory found = Memory()
    found.reserve(4 * rows)
    cdef int32_t *numbers = <int32_t *>found.start
    cdef int64_t row, size, keyless = 0
    cdef uint32_t number
    for row in range(rows):
        size = cell_bytes(&cells, row)
        if size < -1:
            raise layout.cell_outside(row)
        if size < 0:
            numbers[row] = <int32_t>((first + keyless // run) % partitions)
            keyless += 1
            continue
        if by_murmur2:
            number = murmur2_of(cells.data + cells.offsets[row], size)
        else:
            number = murmur3_of(cells.data + cells.offsets[row], size)
        numbers[row] = <int32_t>((number & INT32_MAX) % <uint32_t>partitions)
    found.used = 4 * rows
    return memoryview(found)


def murmur2(bytes key not None):
    """The hash by which Kafka's clients find a key's partition: 32 bits without a sign."""
    return murmur2_of(<const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))


def murmur3(bytes key not None):
    """The 32-bit variant for x86 with the seed 0: 32 bits without a sign."""
    return murmur3_of(<const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))


cdef uint32_t murmur2_of(const uint8_t *at, Py_ssize_t left) noexcept nogil:
    cdef uint32_t number = MURMUR2_SEED ^ <uint32_t>left
    cdef uint32_t word
    while left >= 4:
        word = little32(at) * MURMUR2_M
        word ^= word >> 24
        number = (number * MURMUR2_M) ^ (word * MURMUR2_M)
        at += 4
        left -= 4
    if left:
        number = (number ^ rest_of(at, left)) * MURMUR2_M
    number ^= number >> 13
    number *= MURMUR2_M
    return number ^ (number >> 15)


cdef uint32_t murmur3_of(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    cdef uint32_t number = 0
    cdef Py_ssize_t left = size
    while left >= 4:
        number ^= mixed3(little32(at))
        number = (number << 13) | (number >> 19)
        number = number * 5 + <uint32_t>0xE6546B64
        at += 4
        left -= 4
    if left:
        number ^= mixed3(rest_of(at, left))
    number ^= <uint32_t>size
    number ^= number >> 16
    number *= <uint32_t>0x85EBCA6B
    number ^= number >> 13
    number *= <uint32_t>0xC2B2AE35
    return number ^ (number >> 16)


cdef inline uint32_t mixed3(uint32_t word) noexcept nogil:
    word *= <uint32_t>0xCC9E2D51
    word = (word << 15) | (word >> 17)
    return word * <uint32_t>0x1B873593


cdef inline uint32_t rest_of(const uint8_t *at, Py_ssize_t left) noexcept nogil:
    """One to three bytes, low ones first."""
    cdef uint32_t word = at[0]
    if left > 1:
        word |= <uint32_t>at[1] << 8
    if left > 2:
        word |= <uint32_t>at[2] << 16
    return word
