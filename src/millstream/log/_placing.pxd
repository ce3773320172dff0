# What `engine/_appends.pyx` needs of `_placing.pyx`, to make placed batches without a call.

from libc.stdint cimport int32_t, int64_t


cdef class Mark:
    cdef readonly int64_t next_offset
    cdef readonly int64_t tail
    cdef readonly Py_ssize_t segments
    cdef readonly Py_ssize_t epochs
    cdef readonly Py_ssize_t undo


cdef class End:
    cdef public bytes entry_key
    cdef public object settings
    cdef public int32_t leader_epoch
    cdef public list segments
    cdef public list epochs
    cdef public int64_t next_offset
    cdef public int64_t tail
    cdef public int64_t high_watermark
    cdef public tuple visible
    cdef public list undo
    cdef public list unapplied
    cdef public bint is_stuck
    cdef public int64_t queued
    cdef public bint changed
    cdef public bint is_closed
    # Of the last segment and the settings, as long as they are these.
    cdef object known_segment
    cdef object known_settings
    cdef int64_t segment_base
    cdef int64_t segment_created_ms
    cdef int64_t segment_bytes
    cdef int64_t segment_age_ms

    cpdef Mark mark(self)
    cpdef Placed place(self, data, header, int64_t now_ms)
    cpdef int advance(self, Placed placed) except -1
    cdef int look(self) except -1
    cdef bint is_segment_begun(self, Py_ssize_t size, int64_t last_offset_delta, int64_t now_ms)
    cdef Placed put(self, object data, Py_ssize_t size, object header)


cdef class Placed:
    cdef readonly object segment
    cdef readonly int64_t position
    cdef readonly int64_t base_offset
    cdef readonly int32_t leader_epoch
    cdef readonly object data
    cdef readonly object header
    cdef readonly Py_ssize_t size
    cdef readonly bytes entry_key
    # Of the header, and of the segment.
    cdef int64_t max_timestamp
    cdef int64_t segment_base
    cdef readonly int64_t next_offset
