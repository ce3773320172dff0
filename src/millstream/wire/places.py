"""Where a broker is, as people write it."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from millstream.errors import SettingInvalid

DEFAULT_SERVER = "http://127.0.0.1:8080"


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
