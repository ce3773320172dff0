"""Answers on their way out, past the transport: what lies in a file goes from there by `sendfile`.

A transport takes bytes alone, which would be read for it and copied back into the kernel. So while
it has nothing to send itself, pieces go to the socket directly, as many as the kernel takes at
once. What is left is read and given to the transport, which knows how to wait.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from millstream.wire.kafka.primitives import Piece, Pieces

# Pieces that are at hand; all others lie in files.
IN_MEMORY = bytes | bytearray | memoryview
# No socket to write to directly.
NO_FILE = -1


def socket_file(transport: asyncio.Transport) -> int:
    """The socket's number; NO_FILE where bytes must pass the transport, as with TLS."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("ssl_object") is not None:
        return NO_FILE
    return int(socket.fileno())


def send(transport: asyncio.Transport, socket: int, pieces: Pieces) -> None:
    """All of it, in order. OSError when a file does not have what it had: then half an answer may
    be out, and the connection is of no use any more."""
    rest = pieces
    if any(not isinstance(one, IN_MEMORY) for one in pieces) and not (
        transport.is_closing() or transport.get_write_buffer_size()
    ):
        rest = _send_now(socket, pieces)
    if rest:
        transport.writelines([_bytes_of(one) for one in rest])


def _send_now(socket: int, pieces: Pieces) -> Pieces:
    """What the kernel did not take."""
    for at, piece in enumerate(pieces):
        done, size = 0, len(piece)
        try:
            while done < size:
                sent = _send_part(socket, piece, done)
                if not sent:
                    # The file is shorter: reading it says so.
                    break
                done += sent
        except OSError:
            # Mostly the kernel has enough for now. Whatever else it is, the transport meets it too,
            # or reading the file does.
            pass
        if done < size:
            return [_after(piece, done), *pieces[at + 1 :]]
    return []


def _send_part(socket: int, piece: Piece, done: int) -> int:
    if isinstance(piece, IN_MEMORY):
        return os.write(socket, memoryview(piece)[done:])
    return os.sendfile(socket, piece.file, piece.position + done, len(piece) - done)


def _after(piece: Piece, done: int) -> Piece:
    if not done:
        return piece
    return piece[done:] if isinstance(piece, IN_MEMORY) else piece.read(done)


def _bytes_of(piece: Piece) -> bytes | memoryview:
    return piece if isinstance(piece, IN_MEMORY) else bytes(piece)
