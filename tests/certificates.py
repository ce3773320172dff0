"""Certificates for tests: an authority of our own, and pairs of files that it signed."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

AUTHORITY = trustme.CA()


class Pair:
    """A certificate and its key, in files; written again, they are another pair."""

    def __init__(self, folder: Path) -> None:
        self.certificate = folder / "cert.pem"
        self.key = folder / "key.pem"
        self.authority = folder / "ca.pem"
        AUTHORITY.cert_pem.write_to_path(self.authority)
        self.renew()

    def renew(self) -> None:
        issued = AUTHORITY.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        self.certificate.write_bytes(chain)
        self.key.write_bytes(issued.private_key_pem.bytes())

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.certificate), "--tls-key", str(self.key))

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority))
