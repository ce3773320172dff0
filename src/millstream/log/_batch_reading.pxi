# Part of `_batch.pyx`: the header in C, records one by one, a batch opened, memory that grows.

# ---- the header


cdef struct Head:
    int64_t base_offset
    int32_t length
    int32_t leader_epoch
    int32_t magic
    uint32_t crc
    int32_t attributes
    int32_t last_offset_delta
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t producer_id
    int32_t producer_epoch
    int32_t base_sequence
    int32_t count


cdef inline uint32_t big32(const uint8_t *at) noexcept nogil:
    return (<uint32_t>at[0] << 24) | (<uint32_t>at[1] << 16) | (<uint32_t>at[2] << 8) | at[3]


cdef inline uint32_t little32(const uint8_t *at) noexcept nogil:
    return at[0] | (<uint32_t>at[1] << 8) | (<uint32_t>at[2] << 16) | (<uint32_t>at[3] << 24)


cdef inline int64_t big64(const uint8_t *at) noexcept nogil:
    return <int64_t>((<uint64_t>big32(at) << 32) | big32(at + 4))


cdef inline int32_t big16(const uint8_t *at) noexcept nogil:
    return <int16_t>((at[0] << 8) | at[1])


cdef inline void store32(uint8_t *at, uint32_t number) noexcept nogil:
    at[0] = <uint8_t>(number >> 24)
    at[1] = <uint8_t>(number >> 16)
    at[2] = <uint8_t>(number >> 8)
    at[3] = <uint8_t>number


cdef inline void store64(uint8_t *at, int64_t number) noexcept nogil:
    store32(at, <uint32_t>(<uint64_t>number >> 32))
    store32(at + 4, <uint32_t>number)


cdef inline void load(Head *head, const uint8_t *at) noexcept nogil:
    head.base_offset = big64(at)
    head.length = <int32_t>big32(at + 8)
    head.leader_epoch = <int32_t>big32(at + 12)
    head.magic = at[16]
    head.crc = big32(at + 17)
    head.attributes = big16(at + 21)
    head.last_offset_delta = <int32_t>big32(at + 23)
    head.base_timestamp = big64(at + 27)
    head.max_timestamp = big64(at + 35)
    head.producer_id = big64(at + 43)
    head.producer_epoch = big16(at + 51)
    head.base_sequence = <int32_t>big32(at + 53)
    head.count = <int32_t>big32(at + 57)


cdef object header_of(Head *head):
    # As Header(...), without the tuple that it would be made of.
    cdef object header = PyType_GenericAlloc(Header, 13)
    fill(header, 0, head.base_offset)
    fill(header, 1, head.length)
    fill(header, 2, head.leader_epoch)
    fill(header, 3, head.magic)
    fill(header, 4, head.crc)
    fill(header, 5, head.attributes)
    fill(header, 6, head.last_offset_delta)
    fill(header, 7, head.base_timestamp)
    fill(header, 8, head.max_timestamp)
    fill(header, 9, head.producer_id)
    fill(header, 10, head.producer_epoch)
    fill(header, 11, head.base_sequence)
    fill(header, 12, head.count)
    return header


cdef inline int fill(object header, Py_ssize_t index, int64_t number) except -1:
    cdef object item = number
    Py_INCREF(item)
    PyTuple_SET_ITEM(header, index, item)
    return 0


cdef inline bint counts_fit(Head *head, bint exact) noexcept nogil:
    cdef int64_t offsets = <int64_t>head.last_offset_delta + 1
    if offsets < 1 or head.base_offset > INT64_MAX - offsets:
        return False
    if exact:
        return head.count == offsets
    return 0 <= head.count <= offsets


cdef bint sound(Head *head, const uint8_t *at, bint exact) except -1:
    """What `verify` asks of a batch whose bytes are all there."""
    cdef int64_t body_bytes = head.length - LENGTH_MIN
    cdef int compression = head.attributes & COMPRESSION_MASK
    if compression > COMPRESSION_LAST or not counts_fit(head, exact):
        return False
    if head.count > (INFLATED_BYTES_MAX if compression else body_bytes) // RECORD_BYTES_MIN:
        return False
    return checksum(at, head) == head.crc


cdef inline uint32_t checksum(const uint8_t *at, Head *head) except? 0:
    cdef Py_ssize_t size = <Py_ssize_t>head.length + HEADER_BYTES - LENGTH_MIN - CRC_START
    return crc_of(at + CRC_START, size)


cdef uint32_t[8][256] crc_tables


cdef int fill_crc_tables() except -1:
    """CRC-32C eight bytes at a time: table n is of a byte that n others come after."""
    cdef uint32_t crc
    cdef int byte, bit, table
    for byte in range(256):
        crc = byte
        for bit in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        crc_tables[0][byte] = crc
    for table in range(1, 8):
        for byte in range(256):
            crc = crc_tables[table - 1][byte]
            crc_tables[table][byte] = (crc >> 8) ^ crc_tables[0][crc & 0xFF]
    return 0


cdef uint32_t crc_of(const uint8_t *at, Py_ssize_t size) except? 0:
    """A call of the library costs as much as some hundred bytes do by table."""
    if size > CRC_BY_TABLE_BYTES_MAX:
        return _crc32c(PyMemoryView_FromMemory(<char *>at, size, PyBUF_READ))
    cdef uint32_t crc = ~<uint32_t>0, low, high
    while size >= 8:
        low = crc ^ little32(at)
        high = little32(at + 4)
        crc = (
            crc_tables[7][low & 0xFF]
            ^ crc_tables[6][(low >> 8) & 0xFF]
            ^ crc_tables[5][(low >> 16) & 0xFF]
            ^ crc_tables[4][low >> 24]
            ^ crc_tables[3][high & 0xFF]
            ^ crc_tables[2][(high >> 8) & 0xFF]
            ^ crc_tables[1][(high >> 16) & 0xFF]
            ^ crc_tables[0][high >> 24]
        )
        at += 8
        size -= 8
    while size > 0:
        crc = (crc >> 8) ^ crc_tables[0][(crc ^ at[0]) & 0xFF]
        at += 1
        size -= 1
    return ~crc


fill_crc_tables()


# ---- records


cdef struct Parsed:
    const uint8_t *start
    const uint8_t *end
    int64_t offset_delta
    int64_t timestamp
    const uint8_t *key
    int32_t key_bytes  # -1: none
    const uint8_t *value
    int32_t value_bytes
    const uint8_t *headers
    int32_t header_count


# The readers below answer where what they read ends, or NULL when it does not end in time. What
# leaves their fast paths goes through locals: a variable whose address left could not stay in a
# register, and there are 30 nanoseconds for a record.


cdef inline const uint8_t *read_varint(
    const uint8_t *at, const uint8_t *end, int32_t *number
) noexcept nogil:
    cdef uint32_t bits
    if end - at >= 2:
        bits = at[0]
        if bits < 0x80:
            number[0] = <int32_t>((bits >> 1) ^ (0 - (bits & 1)))
            return at + 1
        if at[1] < 0x80:
            bits = (bits & 0x7F) | (<uint32_t>at[1] << 7)
            number[0] = <int32_t>((bits >> 1) ^ (0 - (bits & 1)))
            return at + 2
    cdef int64_t wide = 0
    at = read_long_varint(at, end, 5, &wide)
    number[0] = <int32_t>wide
    return at


cdef inline const uint8_t *read_varlong(
    const uint8_t *at, const uint8_t *end, int64_t *number
) noexcept nogil:
    cdef uint32_t bits
    if end - at >= 2:
        bits = at[0]
        if bits < 0x80:
            number[0] = <int32_t>((bits >> 1) ^ (0 - (bits & 1)))
            return at + 1
        if at[1] < 0x80:
            bits = (bits & 0x7F) | (<uint32_t>at[1] << 7)
            number[0] = <int32_t>((bits >> 1) ^ (0 - (bits & 1)))
            return at + 2
    cdef int64_t wide = 0
    at = read_long_varint(at, end, 10, &wide)
    number[0] = wide
    return at


cdef const uint8_t *read_long_varint(
    const uint8_t *at, const uint8_t *end, int bytes_max, int64_t *number
) noexcept nogil:
    cdef uint64_t bits = 0
    cdef int place
    for place in range(bytes_max):
        if at >= end or (place == 9 and at[0] > 1):
            return NULL
        bits |= <uint64_t>(at[0] & 0x7F) << (7 * place)
        if at[0] < 0x80:
            if bytes_max == 5 and bits >> 32:
                return NULL
            number[0] = <int64_t>((bits >> 1) ^ (0 - (bits & 1)))
            return at + 1
        at += 1
    return NULL


cdef int check_headers(const uint8_t *at, const uint8_t *end, int32_t count) noexcept nogil:
    cdef int32_t size = 0
    cdef int part
    if count < 0 or count > (end - at) // 2:
        return FAULT_LENGTH
    for _ in range(count):
        for part in range(2):
            at = read_varint(at, end, &size)
            if at is NULL:
                return FAULT_VARINT
            if size > end - at or size < -part:  # a name must be there, a value may be missing
                return FAULT_LENGTH
            at += max(size, 0)
    return 0 if at == end else FAULT_SLACK


cdef inline int next_record(
    const uint8_t *at, const uint8_t *end, Head *head, int64_t last_delta, Parsed *record
) noexcept nogil:
    """Read and check one record, which ends at `record.end`; anything but 0 is a fault."""
    cdef int32_t length = 0, offset_delta = 0, size = 0
    cdef int64_t delta = 0
    record.start = at
    if at == end:
        return FAULT_COUNT
    at = read_varint(at, end, &length)
    if at is NULL:
        return FAULT_VARINT
    if length < 1 or length > end - at:
        return FAULT_LENGTH
    end = at + length
    record.end = end
    at = read_varlong(at + 1, end, &delta)
    if at is NULL:
        return FAULT_VARINT
    record.timestamp = <int64_t>(<uint64_t>head.base_timestamp + <uint64_t>delta)
    if (record.timestamp < head.base_timestamp) != (delta < 0):
        return FAULT_TIMESTAMP
    if head.attributes & APPEND_TIME_MASK:
        record.timestamp = head.max_timestamp
    at = read_varint(at, end, &offset_delta)
    if at is NULL:
        return FAULT_VARINT
    if offset_delta <= last_delta or offset_delta > head.last_offset_delta:
        return FAULT_OFFSET
    record.offset_delta = offset_delta
    at = read_varint(at, end, &size)
    if at is NULL:
        return FAULT_VARINT
    if size > end - at or size < -1:
        return FAULT_LENGTH
    record.key, record.key_bytes = at, size
    at += max(size, 0)
    at = read_varint(at, end, &size)
    if at is NULL:
        return FAULT_VARINT
    if size > end - at or size < -1:
        return FAULT_LENGTH
    record.value, record.value_bytes = at, size
    at += max(size, 0)
    if end - at == 1 and at[0] == 0:
        record.header_count = 0
        return 0
    at = read_varint(at, end, &size)
    if at is NULL:
        return FAULT_VARINT
    record.headers, record.header_count = at, size
    return check_headers(at, end, size)


@cython.final
@cython.no_gc
cdef class Opened:
    """One batch with its body decompressed, and a cursor in it."""

    cdef Head head
    cdef Py_buffer raw
    cdef Py_buffer inflated
    cdef const uint8_t *cursor
    cdef const uint8_t *end
    cdef int64_t last_delta

    def __dealloc__(self):
        PyBuffer_Release(&self.raw)
        PyBuffer_Release(&self.inflated)

    cdef inline int next(self, Parsed *record, Py_ssize_t index) except -1:
        cdef int fault = next_record(
            self.cursor, self.end, &self.head, self.last_delta, record
        )
        if fault:
            raise layout.record_fault(fault, index)
        self.cursor = record.end
        self.last_delta = record.offset_delta
        return 0

    cdef int finish(self) except -1:
        if self.cursor != self.end:
            raise layout.record_fault(FAULT_TRAILING, max(self.head.count - 1, 0))
        return 0


cdef Opened open_batch(object data, object inflated_bytes_max, bint check_crc):
    cdef Opened batch = Opened.__new__(Opened)
    cdef const uint8_t *start
    PyObject_GetBuffer(data, &batch.raw, PyBUF_SIMPLE)
    start = <const uint8_t *>batch.raw.buf
    cdef bint good = batch.raw.len >= HEADER_BYTES
    if good:
        load(&batch.head, start)
        good = (
            batch.head.magic == MAGIC
            and <int64_t>batch.head.length + HEADER_BYTES - LENGTH_MIN == batch.raw.len
            and batch.head.attributes & COMPRESSION_MASK <= COMPRESSION_LAST
            and counts_fit(&batch.head, False)
        )
    if good and check_crc:
        good = checksum(start, &batch.head) == batch.head.crc
    if not good:
        pure.open_batch(data, inflated_bytes_max, check_crc)
        raise AssertionError("the twins do not agree on a header")
    batch.cursor = start + HEADER_BYTES
    batch.end = start + batch.raw.len
    batch.last_delta = -1
    cdef int code = batch.head.attributes & COMPRESSION_MASK
    if code and batch.head.count:
        body = PyMemoryView_FromMemory(
            <char *>batch.cursor, batch.end - batch.cursor, PyBUF_READ
        )
        PyObject_GetBuffer(
            decompress(code, body, inflated_bytes_max), &batch.inflated, PyBUF_SIMPLE
        )
        batch.cursor = <const uint8_t *>batch.inflated.buf
        batch.end = batch.cursor + batch.inflated.len
    if batch.head.count > (batch.end - batch.cursor) // RECORD_BYTES_MIN:
        layout.require_fit(batch.head.count, batch.end - batch.cursor)
    return batch


# ---- memory that grows


@cython.final
@cython.no_gc
cdef class Memory:
    """Bytes that are being written; once handed out as a memoryview, they stay as they are."""

    cdef uint8_t *start
    cdef Py_ssize_t used
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        free(self.start)

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.reserve(1)  # Arrow wants an address even of nothing
        PyBuffer_FillInfo(view, self, self.start, self.used, True, flags)

    cdef int reserve(self, Py_ssize_t more) except -1:
        if more <= self.capacity - self.used:
            return 0
        cdef Py_ssize_t capacity = max(self.used + more, 2 * self.capacity, 64)
        cdef void *moved = realloc(self.start, capacity)
        if moved is NULL:
            raise MemoryError
        self.start = <uint8_t *>moved
        self.capacity = capacity
        return 0

    cdef int reserve_zeros(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t before = self.capacity
        self.reserve(more)
        if self.capacity > before:
            memset(self.start + before, 0, self.capacity - before)
        return 0

    cdef inline int add(self, const void *source, Py_ssize_t size) except -1:
        if size > self.capacity - self.used:
            self.reserve(size)
        memcpy(self.start + self.used, source, size)
        self.used += size
        return 0

    cdef inline int add_varint(self, int64_t number) except -1:
        if self.capacity - self.used < 10:
            self.reserve(10)
        self.used = write_varint(self.start + self.used, number) - self.start
        return 0
