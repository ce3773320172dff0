"""The kinds of value that a setting can have: how each is written, read and shown.

Settings arrive as text, whatever they come from. A kind turns that text into a typed value or
raises ValueError with why it cannot; `expects` says what would have been right. `show` is the
reverse of `parse`, so that what `mill config show` prints can be pasted into a settings file.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Protocol

SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DURATION_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

# Past these no setting means anything: 1 EiB, and 100 years.
SIZE_MAX = 1 << 60
DURATION_MS_MAX = 36_525 * DURATION_UNITS_MS["d"]

_SIZE = re.compile(r"([0-9]{1,20})\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]{1,20})\s*(ms|s|m|h|d)", re.IGNORECASE)
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9._-]{1,253}")


class Kind(Protocol):
    """One way to write a value."""

    @property
    def expects(self) -> str:
        """What a right value looks like, to end a sentence that began with "use"."""
        ...

    def parse(self, text: str) -> object: ...

    def show(self, value: object) -> str: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens. Port 0 lets the system choose a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_everywhere(self) -> bool:
        """Whether it means every address of this machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def clashes_with(self, other: Address) -> bool:
        """Whether two listeners cannot both be there. What a name means is not looked up."""
        if self.port != other.port or self.port == 0:
            return False
        if self.host == other.host:
            return True
        hosts = [_host_or_none(one.host) for one in (self, other)]
        if None in hosts:
            everywhere = self.is_everywhere or other.is_everywhere
            return everywhere or (self.is_loopback and other.is_loopback)
        versions = {one.version for one in hosts if one is not None}
        return len(versions) == 1 and (self.is_everywhere or other.is_everywhere)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, in binary units: 64M is 64 × 1024 × 1024. None stands for `unlimited`."""

    minimum: int = 0
    maximum: int = SIZE_MAX
    unlimited: bool = False

    @property
    def expects(self) -> str:
        return (
            f"a size from {show_size(self.minimum)} to {show_size(self.maximum)}, "
            f"such as 64K, 256M or 2G{', or `unlimited`' if self.unlimited else ''}"
        )

    def parse(self, text: str) -> int | None:
        if self.unlimited and text.lower() == "unlimited":
            return None
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError("is not a size")
        size = int(match[1]) * SIZE_UNITS[match[2].upper()]
        _check_range(size, self.minimum, self.maximum)
        return size

    def show(self, value: object) -> str:
        return "unlimited" if value is None else show_size(_integer(value))


@dataclass(frozen=True, slots=True)
class Duration:
    """Time, kept in milliseconds. None stands for `otherwise`, a word such as `unlimited`."""

    minimum_ms: int = 0
    maximum_ms: int = DURATION_MS_MAX
    otherwise: str | None = None

    @property
    def expects(self) -> str:
        return (
            f"a duration from {show_duration(self.minimum_ms)} to "
            f"{show_duration(self.maximum_ms)}, such as 500ms, 30s, 5m, 24h or 7d"
            f"{f', or `{self.otherwise}`' if self.otherwise else ''}"
        )

    def parse(self, text: str) -> int | None:
        if self.otherwise is not None and text.lower() == self.otherwise:
            return None
        match = _DURATION.fullmatch(text)
        if match is None:
            # A bare number is refused on purpose: seconds to one reader, milliseconds to another.
            raise ValueError("has no unit" if text.isdecimal() else "is not a duration")
        duration_ms = int(match[1]) * DURATION_UNITS_MS[match[2].lower()]
        _check_range(duration_ms, self.minimum_ms, self.maximum_ms)
        return duration_ms

    def show(self, value: object) -> str:
        return str(self.otherwise) if value is None else show_duration(_integer(value))


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number. None stands for `otherwise`, a word of its own such as `max`."""

    minimum: int
    maximum: int
    otherwise: str | None = None

    @property
    def expects(self) -> str:
        word = f", or `{self.otherwise}`" if self.otherwise else ""
        return f"a whole number from {self.minimum} to {self.maximum}{word}"

    def parse(self, text: str) -> int | None:
        if self.otherwise is not None and text.lower() == self.otherwise:
            return None
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text) is None:
            raise ValueError("is not a whole number")
        number = int(text)
        _check_range(number, self.minimum, self.maximum)
        return number

    def show(self, value: object) -> str:
        return str(self.otherwise) if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expects(self) -> str:
        return "one of " + ", ".join(f"`{word}`" for word in self.words)

    def parse(self, text: str) -> str:
        if text.lower() not in self.words:
            raise ValueError("is not one of the choices")
        return text.lower()

    def show(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory, kept as an absolute path. It need not exist yet."""

    expects: str = "the path of a directory, such as ./data or /var/lib/millstream"

    def parse(self, text: str) -> str:
        if not text:
            raise ValueError("is empty")
        if "\0" in text:
            raise ValueError("has a NUL character")
        path = os.path.abspath(os.path.expanduser(text))
        if os.path.exists(path) and not os.path.isdir(path):
            raise ValueError("is a file, not a directory")
        return path

    def show(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class File:
    """A file that is there, kept as an absolute path. None, written as nothing, is no file."""

    expects: str = "the path of a file, or nothing"

    def parse(self, text: str) -> str | None:
        if not text:
            return None
        if "\0" in text:
            raise ValueError("has a NUL character")
        path = os.path.abspath(os.path.expanduser(text))
        if os.path.isdir(path):
            raise ValueError("is a directory, not a file")
        if not os.path.exists(path):
            raise ValueError("is not there")
        return path

    def show(self, value: object) -> str:
        return "" if value is None else str(value)


def _host_or_none(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """HOST:PORT, or `off`, which is None."""

    expects: str = "HOST:PORT, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080, or `off`"

    def parse(self, text: str) -> Address | None:
        if text.lower() == "off":
            return None
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError("is not HOST:PORT")
        if re.fullmatch(r"[0-9]{1,9}", port) is None:
            raise ValueError("has no port")
        if int(port) > 65_535:
            raise ValueError("has a port above 65535")
        if host.startswith("[") and host.endswith("]"):
            try:
                return Address(str(ipaddress.IPv6Address(host[1:-1])), int(port))
            except ValueError:
                raise ValueError("has brackets around what is no IPv6 address") from None
        if not host:
            # `:8080` opens every interface elsewhere; too easy to do by mistake.
            raise ValueError("has no host")
        if _HOST_NAME.fullmatch(host) is None:
            raise ValueError("has a host that is no name and no address")
        return Address(host, int(port))

    def show(self, value: object) -> str:
        return "off" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class AbsentListener:
    """A listener that this version does not have: its only value is `off`."""

    listener: str
    expects: str = "`off`"

    def parse(self, text: str) -> None:
        if text.lower() != "off":
            raise ValueError(f"names an address, but this version has no {self.listener} listener")

    def show(self, value: object) -> str:  # noqa: ARG002 — there is one value
        return "off"


@dataclass(frozen=True, slots=True)
class HostNames:
    """Host names with commas between; a leading dot takes in all names below; `*` is every name."""

    expects: str = "host names with commas between, such as broker.example.com,.internal, or `*`"

    def parse(self, text: str) -> tuple[str, ...]:
        names = tuple(part.strip().lower() for part in text.split(",") if part.strip())
        for name in names:
            if name != "*" and _HOST_NAME.fullmatch(name) is None:
                raise ValueError(f"has `{name}`, which is no host name")
        return names

    def show(self, value: object) -> str:
        return ",".join(value) if isinstance(value, tuple) else ""


def show_size(size: int) -> str:
    """In the largest unit that leaves no fraction."""
    return _show_in_units(size, SIZE_UNITS) or "0"


def show_duration(duration_ms: int) -> str:
    """In the largest unit that leaves no fraction."""
    return _show_in_units(duration_ms, DURATION_UNITS_MS) or "0s"


def _show_in_units(value: int, units: dict[str, int]) -> str | None:
    if value == 0:
        return None
    for unit, factor in reversed(units.items()):
        if value % factor == 0:
            return f"{value // factor}{unit}"
    return None


def _check_range(value: int, minimum: int, maximum: int) -> None:
    if value < minimum:
        raise ValueError("is too small")
    if value > maximum:
        raise ValueError("is too large")


def _integer(value: object) -> int:
    assert isinstance(value, int), value
    return value
