# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What group commit does for every append, compiled: the twin of `_appends_pure.py`."""

cimport cython
from libc.stdint cimport int64_t

from millstream.log._placing cimport End, Mark, Placed

import asyncio

import structlog

cdef object UNSET = object()


@cython.final
@cython.freelist(512)
cdef class Pending:
    """A result that is not there yet; `pending.py` says why."""

    cdef object _value
    cdef object _error
    # Nearly always there is one callback, so only others need a list.
    cdef object _callback
    cdef list _more

    def __cinit__(self):
        self._value = UNSET

    def __class_getitem__(cls, _):
        return cls

    @classmethod
    def of(cls, value):
        cdef Pending pending = Pending.__new__(Pending)
        pending._value = value
        return pending

    @classmethod
    def failed(cls, error not None):
        cdef Pending pending = Pending.__new__(Pending)
        pending._error = error
        return pending

    @property
    def is_done(self):
        return self._value is not UNSET or self._error is not None

    @property
    def error(self):
        return self._error

    def result(self):
        """The value; raises the error if it failed."""
        if self._error is not None:
            raise self._error
        assert self._value is not UNSET, "the result is not there yet"
        return self._value

    def then(self, callback not None):
        """Call when done; at once when it is done already."""
        if self._value is not UNSET or self._error is not None:
            self.call(callback)
        elif self._callback is None:
            self._callback = callback
        elif self._more is None:
            self._more = [callback]
        else:
            self._more.append(callback)

    def succeed(self, value):
        """The first outcome counts: a wait that was cancelled may still be woken."""
        self.set_value(value)

    cdef int set_value(self, value) except -1:
        if self._value is UNSET and self._error is None:
            self._value = value
            if self._callback is not None:
                self.call(self._callback)
        return 0

    def fail(self, error not None):
        if self._value is UNSET and self._error is None:
            self._error = error
            if self._callback is not None:
                self.call(self._callback)

    cdef int call(self, callback) except -1:
        """A callback that fails is its owner's business: who completes this one goes on."""
        cdef list more = self._more
        self._callback = self._more = None
        try:
            callback(self)
        except Exception:
            structlog.get_logger("millstream.engine").exception("a callback failed")
        if more is not None:
            for other in more:
                self.call(other)
        return 0

    def __await__(self):
        if not self.is_done:
            future = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if future.done() else future.set_result(None))
            yield from future
        return self.result()


@cython.final
@cython.freelist(512)
cdef class Append:
    """One batch for one partition."""

    cdef readonly End partition
    cdef readonly object data
    cdef readonly object header
    cdef readonly Py_ssize_t size
    cdef readonly Pending pending
    cdef public int64_t offset

    def __init__(self, End partition not None, data, header):
        self.partition = partition
        self.data = data
        self.header = header
        self.size = len(data)
        self.pending = Pending.__new__(Pending)
        self.offset = -1

    def partitions(self):
        return (self.partition,)

    def succeed(self):
        self.pending.set_value(self.offset)

    def fail(self, error):
        self.pending.fail(error)


def queue(list turn, queued):
    """Let the first operations of a turn wait for a round, as long as they are appends that do;
    answers how many."""
    cdef Py_ssize_t at, count = len(turn)
    cdef Append one
    cdef End partition
    for at in range(count):
        if type(turn[at]) is not Append:
            return at
        one = turn[at]
        partition = one.partition
        if not partition.queued and partition.settings.fsync != "every":
            return at
        partition.queued += 1
        queued.append(one)
    return count


def size_of(list operations not None):
    cdef Py_ssize_t total = 0
    for operation in operations:
        if type(operation) is Append:
            total += (<Append>operation).size
        else:
            total += operation.size
    return total


def largest_of(list operations not None):
    """The size of the largest append among them."""
    cdef Py_ssize_t largest = 0
    for operation in operations:
        if type(operation) is Append:
            largest = max(largest, (<Append>operation).size)
    return largest


def place(
    list operations, Py_ssize_t first, int64_t now_ms, dict marks, *, dict journalled, list entries
):
    """Give their places to operations from `first` on, all of them for the journal, as far as
    `End.place` does that; answers which is the first that needs more."""
    cdef Py_ssize_t at, count = len(operations)
    cdef End last = None, partition
    cdef list batches = None
    cdef Append one
    cdef Mark mark = None
    cdef Placed placed
    for at in range(first, count):
        if type(operations[at]) is not Append:
            return at
        one = operations[at]
        partition = one.partition
        if partition is not last:
            mark = partition.mark()
        placed = partition.place(one.data, one.header, now_ms)
        if placed is None:
            return at
        if partition is not last:
            last = partition
            marks.setdefault(partition, mark)
            batches = journalled.setdefault(partition, [])
        one.offset = placed.base_offset
        batches.append(placed)
        entries.append(placed)
    return count


def advance(dict journalled, dict unapplied):
    """A round is durable: readers may see what is in it, and it waits for its segments."""
    cdef End partition
    cdef list batches
    for partition, batches in journalled.items():
        partition.unapplied.extend(batches)
        unapplied[partition] = None
        partition.undo.clear()
        partition.advance(batches[len(batches) - 1])


def answer(list operations, Py_ssize_t first):
    """Answer operations from `first` on, as long as they are appends; answers which is not."""
    cdef Py_ssize_t at, end = first, count = len(operations)
    cdef Append one
    while end < count and type(operations[end]) is Append:
        one = operations[end]
        one.partition.queued -= 1
        end += 1
    for at in range(first, end):
        one = operations[at]
        one.pending.set_value(one.offset)
    return end
