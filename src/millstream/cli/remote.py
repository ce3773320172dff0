"""How commands talk to a broker: plain HTTP, by the standard library, so that they start quickly
and work where only the light client is installed.
"""

from __future__ import annotations

import http.client
import ssl
from typing import Annotated, Any, NamedTuple, Optional

import msgspec
import typer

from millstream.errors import BrokerUnreachable, SettingInvalid
from millstream.wire.places import Place
from millstream.wire.refusals import refusal

# Longer than a busy broker takes; a dequeue that waits gets its own time on top.
PATIENCE_S = 30.0

Server = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", envvar="MILLSTREAM_SERVER", help="Where the broker is."
    ),
]
Ca = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option(
        "--ca",
        metavar="FILE",
        envvar="MILLSTREAM_CA",
        help="For https: whose certificates are trusted, in PEM. By default those that this "
        "system trusts.",
    ),
]


class Reply(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Remote:
    """A broker somewhere, over one connection that is kept open."""

    def __init__(self, server: str, ca: str | None = None) -> None:
        self.server = server.rstrip("/")
        self._connection = _connection(self.server, ca)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        media: str = "application/json",
        wait_s: float = 0.0,
    ) -> Reply:
        """A request and its answer. What the broker refuses is raised as the error that it is."""
        self._connection.timeout = PATIENCE_S + wait_s
        headers = {"content-type": media, "accept": "application/json"}
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            reply = Reply(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._unreachable(error) from error
        if reply.status >= 400:
            raise refusal(self.server, reply.status, reply.body)
        return reply

    def _unreachable(self, error: Exception) -> BrokerUnreachable:
        if isinstance(error, ssl.SSLCertVerificationError):
            return BrokerUnreachable(
                f"the certificate of {self.server} is not trusted: {error.verify_message}; name "
                "who signed it with --ca or MILLSTREAM_CA",
                server=self.server,
            )
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        what_to_do = (
            "start one with `mill serve`, or name another with --server or MILLSTREAM_SERVER"
        )
        if isinstance(error, ssl.SSLError):
            what_to_do = "a broker that speaks no TLS is called by http://"
        elif isinstance(error, ConnectionResetError | http.client.RemoteDisconnected):
            what_to_do += "; a broker that speaks TLS is called by https://"
        return BrokerUnreachable(
            f"no broker answers at {self.server}: {why}; {what_to_do}", server=self.server
        )


def _connection(server: str, ca: str | None) -> http.client.HTTPConnection:
    place = Place.of(server)
    context = tls_of(server, ca)
    if context is not None:
        return http.client.HTTPSConnection(place.host, place.port, context=context)
    return http.client.HTTPConnection(place.host, place.port)


def tls_of(server: str, ca: str | None) -> ssl.SSLContext | None:
    """For a broker that is reached by https: whom to trust."""
    if not Place.of(server).is_secure:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        why = "is no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingInvalid(
            f"--ca is {ca!r}, which cannot be used: {why}", setting="ca", value=ca or ""
        ) from error
