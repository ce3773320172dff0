"""Where a broker is, as people write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from millstream.errors import SettingInvalid

SERVER_VARIABLE = "MILLSTREAM_SERVER"
DEFAULT_SERVER = "http://127.0.0.1:8080"


def server_of(given: str | None, environment: Mapping[str, str]) -> str:
    """Where the broker is for who names none: where the environment says, or on this machine."""
    if given is not None:
        return given
    said = environment.get(SERVER_VARIABLE)
    if not said:
        return DEFAULT_SERVER
    try:
        return Place.of(said).url
    except SettingInvalid as error:
        raise SettingInvalid(
            f"{SERVER_VARIABLE}: {error.message}", setting=SERVER_VARIABLE, value=said
        ) from error


class Place(NamedTuple):
    """Where a broker is."""

    url: str
    host: str
    port: int
    is_secure: bool
    authority: str

    @classmethod
    def of(cls, server: str) -> Place:
        url = server.rstrip("/")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https") or parts.path:
            raise SettingInvalid(
                f"{server!r} is not where a broker can be; use a URL such as {DEFAULT_SERVER}",
                setting="server",
                value=server,
            )
        is_secure = parts.scheme == "https"
        number = port if port is not None else 443 if is_secure else 80
        return cls(url, host, number, is_secure, parts.netloc.rpartition("@")[2])
