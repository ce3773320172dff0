"""What a broker asks of the system that runs it: files, sockets, and a word to systemd."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from typing import TYPE_CHECKING

from millstream.errors import AddressUnavailable

if TYPE_CHECKING:
    from millstream.kinds import Address


def raise_open_files(wanted: int | None) -> int:
    """Raise the soft limit of open files to `wanted`, or as far as it goes; answers the limit.

    Systems start programs with a low soft limit for the sake of old ones that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = hard if wanted is None else wanted
    if hard != unlimited and (target == unlimited or target > hard):
        target = hard
    if target == soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError):
        # macOS refuses what is above its own kernel's limit, also when the hard one is unlimited.
        return soft
    return target


def lock_owner(path: str) -> str | None:
    """What the holder of a lock file wrote into it; None when nobody holds it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(file, 64, 0).decode(errors="replace").strip()
    else:
        return None
    finally:
        os.close(file)


def bind(setting: str, address: Address) -> socket.socket:
    """A socket on the address, not listening yet, or AddressUnavailable."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise _unavailable(
            setting, address, f"its host has no address: {error.strerror}"
        ) from error
    family, kind, protocol, _, where = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # A broker that just ended leaves its port in TIME_WAIT; this lets the next one have it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            why = "another program uses it; stop that one, or choose another port"
        elif error.errno == errno.EACCES:
            why = "this user may not use it; choose a port from 1024 on"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = "this machine does not have that address"
        else:
            why = os.strerror(error.errno or 0)
        raise _unavailable(setting, address, why) from error
    bound.setblocking(False)
    return bound


def notify_systemd(state: str) -> bool:
    """Send a state such as `READY=1` to systemd; False when nobody asked for it.

    The protocol is one datagram to the socket that NOTIFY_SOCKET names; `@` stands for the NUL
    of an abstract one. A manager that has gone away is not our failure.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    target = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        try:
            notify.sendto(state.encode(), target)
        except OSError:
            return False
    return True


def _unavailable(setting: str, address: Address, why: str) -> AddressUnavailable:
    return AddressUnavailable(
        f"cannot listen on {address}, the setting {setting}: {why}",
        setting=setting,
        address=str(address),
    )
