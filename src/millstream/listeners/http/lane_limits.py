"""What one connection of the fast lane may have waiting, and how long it may take."""

from __future__ import annotations

# A head that takes longer, from its first byte to its last, is not being sent in earnest. A body
# gets a second more for every 16 KiB that came.
HEAD_S_MAX = 10.0
BODY_S_MAX = 60.0
BODY_BYTES_PER_S_MIN = 16 * 1024
# How long answers may lie unread.
UNREAD_S_MAX = 60.0
# How long a refused client has to read why.
LINGER_S = 1.0
# What may wait for its turn.
LINE_REQUESTS_MAX = 64
LINE_BYTES_MAX = 1024 * 1024
# What is parsed before a look at the line: a packet can hold ten thousand small requests.
# Chunks of a byte take a hundred times as long as a body in one piece, and others wait meanwhile.
SLICE_BYTES = 16 * 1024
SLICES_PER_TURN = 4
# Answers to one packet that are written together.
WRITE_BYTES = 64 * 1024


def body_s_max(came_bytes: int) -> float:
    return BODY_S_MAX + came_bytes / BODY_BYTES_PER_S_MIN
