"""TLS for listeners: a certificate and its key, how they are changed while the broker runs, and how
many clients may be on the way in.

A listener holds one context for its whole life. What a connection uses is chosen in its handshake:
the newest pair that could be read. So a change is one assignment, and a pair that cannot be used
never touches the one that is in use.

A client that connects and never begins to talk TLS is a connection that no protocol knows of. The
door lets in only so many of them at a time: the others wait outside, where they cost the broker no
file.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, NoReturn

from millstream.errors import SettingInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

# How long a client may take to agree on TLS, and to confirm that a TLS connection ends.
HANDSHAKE_SECONDS = 10.0
GOODBYE_SECONDS = 1.0
# How many may be on the way in, at most, and as a part of all connections: what is left of the
# open files is for the broker itself.
HANDSHAKES_MAX = 512
HANDSHAKES_PART = 8
# How long to wait when the system has no file for one more.
ACCEPT_PAUSE_SECONDS = 0.1
# HTTP/2 is not spoken here, and a client that asks for both has to be told.
PROTOCOLS = ["http/1.1"]


class Certificates:
    """The pair in two files. `context` is for listeners."""

    def __init__(self, certificate_file: str, key_file: str) -> None:
        """SettingInvalid when the files are no such pair."""
        self._certificate_file = certificate_file
        self._key_file = key_file
        self.context = _read(certificate_file, key_file)
        self._newest = self.context
        # OpenSSL calls it in every handshake, also when the client names no server.
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read the files again. SettingInvalid when they are no such pair; then nothing changes."""
        self._newest = _read(self._certificate_file, self._key_file)

    def _choose(self, connection: ssl.SSLObject, *_: object) -> None:
        connection.context = self._newest


class TlsDoor:
    """Accepts connections on a socket, until it is closed, and hands over those with TLS."""

    def __init__(
        self,
        bound: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.BaseProtocol],
        *,
        backlog: int,
        connections_max: int,
    ) -> None:
        self._bound = bound
        self._context = context
        self._make = make
        self._room = asyncio.Semaphore(
            max(1, min(HANDSHAKES_MAX, connections_max // HANDSHAKES_PART))
        )
        self._agreeing: set[asyncio.Task[None]] = set()
        bound.listen(backlog)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept no more, and end those on the way in. Connections that are made go on."""
        self._accepting.cancel()
        for task in self._agreeing:
            task.cancel()
        self._bound.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._bound)
            except OSError:
                self._room.release()
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._agree(accepted))
            self._agreeing.add(task)
            task.add_done_callback(self._agreeing.discard)

    async def _agree(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=GOODBYE_SECONDS,
            )
        except OSError:
            # It spoke something else, took too long or went away: nothing that was promised.
            accepted.close()
        finally:
            self._room.release()


def _read(certificate_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(PROTOCOLS)
    for setting, path in (("tls_cert", certificate_file), ("tls_key", key_file)):
        _check_readable(setting, path)

    def no_passphrase() -> NoReturn:
        # Without this, OpenSSL would ask whoever sits at the terminal, and wait.
        raise _invalid("tls_key", key_file, "is encrypted; store the key without a passphrase")

    try:
        context.load_cert_chain(certificate_file, key_file, no_passphrase)
    except ssl.SSLError as error:
        raise _refusal(certificate_file, key_file, error) from error
    return context


def _check_readable(setting: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise _invalid(setting, path, f"cannot be read: {error.strerror}") from error


def _refusal(certificate_file: str, key_file: str, error: ssl.SSLError) -> SettingInvalid:
    if error.reason == "KEY_VALUES_MISMATCH":
        why = f"does not belong to the certificate {certificate_file}; use the one that does"
        return _invalid("tls_key", key_file, why)
    # OpenSSL does not say which of the two it could not read.
    setting, path = "tls_key", key_file
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate_file)
    except ssl.SSLError:
        setting, path = "tls_cert", certificate_file
    what = "certificate" if setting == "tls_cert" else "private key"
    return _invalid(setting, path, f"is not a {what} in PEM ({error.reason or error})")


def _invalid(setting: str, path: str, why: str) -> SettingInvalid:
    return SettingInvalid(
        f"one setting cannot be used:\n  {setting} = {path!r} {why}", setting=setting, value=path
    )
