# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The frame codec, compiled: the twin of `_frames_pure.py`. The layout: `_frames_layout.py`.

Whatever is wrong with a frame is only noticed here; what it is called is in the layout.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from millstream.wire import _frames_layout as layout

cdef enum:
    # As in `_frames_layout.py`; they are compared below, once, at import.
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PONG = 10
    FIN = 0x80
    RESERVED = 0x70
    OPCODE = 0x0F
    MASKED = 0x80
    LENGTH = 0x7F
    SHORT_MAX = 125

for _name, _value in {
    "CONTINUATION": CONTINUATION, "TEXT": TEXT, "BINARY": BINARY, "CLOSE": CLOSE, "PONG": PONG,
    "FIN": FIN, "RESERVED": RESERVED, "OPCODE": OPCODE, "MASKED": MASKED, "LENGTH": LENGTH,
    "SHORT_MAX": SHORT_MAX,
}.items():
    assert getattr(layout, _name) == _value, _name



cdef class FrameReader:
    """As in the pure twin, which says what its attributes are for."""

    cdef Py_ssize_t _text_bytes_max
    cdef Py_ssize_t _binary_bytes_max
    cdef int _mask_bit
    cdef bytearray _held
    cdef Py_ssize_t _need
    cdef bytes _rest
    cdef Py_ssize_t _position
    cdef bytearray _message
    cdef int _opcode
    cdef readonly bint has_more
    cdef readonly bint has_control
    cdef readonly object error

    def __init__(
        self, Py_ssize_t text_bytes_max, Py_ssize_t binary_bytes_max, *, bint from_client=True
    ):
        self._text_bytes_max = text_bytes_max
        self._binary_bytes_max = binary_bytes_max
        self._mask_bit = MASKED if from_client else 0
        # Most connections never need these two, so they are made when they are.
        self._held = None
        self._message = None
        self._need = 2
        self._rest = b""
        self._position = 0
        self._opcode = CONTINUATION
        self.has_more = False
        self.has_control = False
        self.error = None

    @property
    def is_partial(self):
        return self._held is not None or self._opcode != CONTINUATION

    def feed(self, bytes data not None, Py_ssize_t frames_max=layout.FRAMES_ALL):
        cdef list events = []
        cdef Py_ssize_t position = 0
        self.has_control = False
        if self.error is not None:
            return events
        if self.has_more:
            if data:
                data = self._rest[self._position:] + data
            else:
                data, position = self._rest, self._position
            self._rest = b""
            self.has_more = False
        elif self._held is not None:
            self._held += data
            if len(self._held) < self._need:
                return events
            data = bytes(self._held)
            self._held = None
        try:
            self._read(data, position, events, frames_max)
        except layout.FrameError as error:
            self.error = error
        return events

    cdef int _read(
        self, bytes data, Py_ssize_t position, list events, Py_ssize_t frames_left
    ) except -1:
        cdef const uint8_t *at = <const uint8_t *> PyBytes_AS_STRING(data)
        cdef Py_ssize_t end = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t stop
        while end - position >= 2:
            if frames_left <= 0:
                self._rest = data
                self._position = position
                self.has_more = True
                return 0
            frames_left -= 1
            stop = self._read_frame(at, position, end, events)
            if stop == 0:
                break
            position = stop
        else:
            self._need = 2
        if position < end:
            self._held = bytearray(data[position:] if position else data)
        return 0

    cdef Py_ssize_t _read_frame(
        self, const uint8_t *at, Py_ssize_t position, Py_ssize_t end, list events
    ) except -1:
        """Any frame; answers where it ends, or 0 when more bytes are needed."""
        cdef int first = at[position]
        cdef int second = at[position + 1]
        cdef int opcode = first & OPCODE
        cdef Py_ssize_t size = second & LENGTH
        cdef Py_ssize_t head = 2
        cdef Py_ssize_t start, stop
        cdef bytes payload
        cdef bint is_ascii = False
        if first & RESERVED:
            raise layout.reserved_bits()
        if second & MASKED != self._mask_bit:
            raise layout.wrong_mask()
        if size > SHORT_MAX:
            head = 4 if size == 126 else 10
            if end - position < head:
                self._need = head
                return 0
            size = long_size(at + position + 2, size)
            if size < 0:
                raise layout.wrong_length()
        self._check_head(first, size)
        start = position + head + (4 if self._mask_bit else 0)
        # Not added up: a length may be as large as the number.
        if size > end - start:
            self._need = start - position + size
            return 0
        stop = start + size
        payload = PyBytes_FromStringAndSize(NULL, size)
        if self._mask_bit:
            is_ascii = masked_copy(
                <uint8_t *> PyBytes_AS_STRING(payload), at + start, size, at + start - 4
            )
        else:
            memcpy(PyBytes_AS_STRING(payload), at + start, size)
        if opcode >= CLOSE:
            self.has_control = True
            events.append((opcode, payload))
        elif opcode and first & FIN:
            if opcode == TEXT and not is_ascii and not payload.isascii():
                layout.check_utf8(payload)
            events.append((opcode, payload))
        else:
            self._take_part(first, payload, events)
        return stop

    cdef int _check_head(self, int first, Py_ssize_t size) except -1:
        cdef int opcode = first & OPCODE
        cdef Py_ssize_t bytes_max
        cdef Py_ssize_t before = 0
        if opcode >= CLOSE:
            if opcode > PONG:
                raise layout.no_opcode(opcode)
            if not first & FIN or size > SHORT_MAX:
                raise layout.wrong_control()
            return 0
        if opcode > BINARY:
            raise layout.no_opcode(opcode)
        if (opcode == CONTINUATION) != (self._opcode != CONTINUATION):
            raise layout.out_of_order()
        if opcode == CONTINUATION:
            opcode = self._opcode
            before = len(self._message)
        bytes_max = self._text_bytes_max if opcode == TEXT else self._binary_bytes_max
        if size > bytes_max - before:
            raise layout.too_large(bytes_max)
        return 0

    cdef int _take_part(self, int first, bytes payload, list events) except -1:
        """A frame that is not a message by itself."""
        cdef int opcode = first & OPCODE
        cdef bytes whole
        if opcode != CONTINUATION:
            self._opcode = opcode
            self._message = bytearray()
        self._message += payload
        if not first & FIN:
            return 0
        whole = bytes(self._message)
        opcode = self._opcode
        self._message = None
        self._opcode = CONTINUATION
        if opcode == TEXT and not whole.isascii():
            layout.check_utf8(whole)
        events.append((opcode, whole))
        return 0


cdef Py_ssize_t long_size(const uint8_t *at, Py_ssize_t kind) noexcept:
    """A length of 16 or 64 bits; -1 when it is not in its shortest form."""
    cdef uint64_t size = 0
    cdef int index
    for index in range(2 if kind == 126 else 8):
        size = size << 8 | at[index]
    if size < <uint64_t> (126 if kind == 126 else 1 << 16) or size >> 63:
        return -1
    return <Py_ssize_t> size


cdef bint masked_copy(
    uint8_t *to, const uint8_t *source, Py_ssize_t size, const uint8_t *key
) noexcept:
    """Copy and mask, or unmask, which is the same; whether the result is ASCII."""
    cdef uint32_t key_of_four
    cdef uint64_t key_of_eight, eight, seen = 0
    cdef uint8_t one
    cdef Py_ssize_t index = 0
    memcpy(&key_of_four, key, 4)
    key_of_eight = <uint64_t> key_of_four << 32 | key_of_four
    while index + 8 <= size:
        memcpy(&eight, source + index, 8)
        eight ^= key_of_eight
        seen |= eight
        memcpy(to + index, &eight, 8)
        index += 8
    while index < size:
        one = source[index] ^ key[index & 3]
        seen |= one
        to[index] = one
        index += 1
    return not seen & <uint64_t> 0x8080808080808080


def unmask(bytes payload not None, bytes key not None):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(payload)
    cdef bytes result = PyBytes_FromStringAndSize(NULL, size)
    if PyBytes_GET_SIZE(key) != 4:
        raise ValueError("a masking key has four bytes")
    masked_copy(
        <uint8_t *> PyBytes_AS_STRING(result),
        <const uint8_t *> PyBytes_AS_STRING(payload),
        size,
        <const uint8_t *> PyBytes_AS_STRING(key),
    )
    return result


cdef inline Py_ssize_t head_bytes(Py_ssize_t size) noexcept:
    if size <= SHORT_MAX:
        return 2
    return 4 if size < 1 << 16 else 10


cdef inline uint8_t *put_head(uint8_t *to, int opcode, Py_ssize_t size) noexcept:
    cdef int index
    to[0] = FIN | opcode
    if size <= SHORT_MAX:
        to[1] = <uint8_t> size
        return to + 2
    if size < 1 << 16:
        to[1] = 126
        to[2] = <uint8_t> (size >> 8)
        to[3] = <uint8_t> (size & 0xFF)
        return to + 4
    to[1] = 127
    for index in range(8):
        to[2 + index] = <uint8_t> (<uint64_t> size >> (56 - 8 * index) & 0xFF)
    return to + 10


def encode_many(int opcode, list payloads not None):
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size
    cdef bytes payload, result
    cdef uint8_t *to
    for payload in payloads:
        size = len(payload)
        total += head_bytes(size) + size
    result = PyBytes_FromStringAndSize(NULL, total)
    to = <uint8_t *> PyBytes_AS_STRING(result)
    for payload in payloads:
        size = PyBytes_GET_SIZE(payload)
        to = put_head(to, opcode, size)
        memcpy(to, PyBytes_AS_STRING(payload), size)
        to += size
    return result


def encode_counted(bytes before not None, uint64_t first, Py_ssize_t count, bytes after not None):
    cdef Py_ssize_t before_bytes = PyBytes_GET_SIZE(before)
    cdef Py_ssize_t after_bytes = PyBytes_GET_SIZE(after)
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size, index
    cdef uint64_t number
    cdef bytes result
    cdef uint8_t *to
    for index in range(count):
        size = before_bytes + digits(first + index) + after_bytes
        total += head_bytes(size) + size
    result = PyBytes_FromStringAndSize(NULL, total)
    to = <uint8_t *> PyBytes_AS_STRING(result)
    for index in range(count):
        number = first + index
        size = digits(number)
        to = put_head(to, TEXT, before_bytes + size + after_bytes)
        memcpy(to, PyBytes_AS_STRING(before), before_bytes)
        to += before_bytes + size
        put_number(to, number)
        memcpy(to, PyBytes_AS_STRING(after), after_bytes)
        to += after_bytes
    return result


cdef inline int digits(uint64_t number) noexcept:
    cdef int count = 1
    while number >= 10:
        number //= 10
        count += 1
    return count


cdef inline void put_number(uint8_t *end, uint64_t number) noexcept:
    """In decimal, to the left of a place."""
    while True:
        end -= 1
        end[0] = <uint8_t> (48 + number % 10)
        number //= 10
        if number == 0:
            return
