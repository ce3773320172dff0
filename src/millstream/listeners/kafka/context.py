"""What all handlers of the listener work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.broker.manifests import cluster_id
from millstream.engine.pending import Pending
from millstream.kinds import Address
from millstream.listeners.kafka.codes import OF_COORDINATOR, code_of
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns
    from millstream.listeners.kafka.apis import Call
    from millstream.listeners.kafka.configs import Config
    from millstream.listeners.kafka.connection import Shared


@dataclass(slots=True)
class Context:
    broker: Broker
    engine: Engine
    shared: Shared
    turns: Turns
    node_id: int
    fetch_bytes_max: int = 55 * 1024 * 1024
    # Its settings, as Kafka shows them.
    broker_configs: list[Config] = field(default_factory=list)
    # Where HTTP is served, and whether with TLS: by it clients find what Kafka has no word for.
    http: Address | None = None
    is_secure: bool = False
    # Whether any was looked for since the start, or was there when somebody asked.
    has_groups: bool = False
    _cluster_id: str = field(default="", init=False)

    @property
    def cluster_id(self) -> str:
        if not self._cluster_id:
            self._cluster_id = cluster_id(self.engine)
        return self._cluster_id

    def pause(self) -> Pending[None]:
        """Done in the next turn of the loop: who answers for thousands of things lets others in
        between."""
        pending: Pending[None] = Pending()
        self.turns.soon(lambda: pending.succeed(None))
        return pending

    def http_url(self, call: Call) -> str | None:
        """Where HTTP is, for a client; None where it is not served."""
        if self.http is None:
            return None
        host = call.here.host if self.http.is_everywhere else self.http.host
        return f"{'https' if self.is_secure else 'http'}://{Address(host, self.http.port)}"

    def code(self, error: BaseException) -> Code:
        """Of an error that goes into an answer; counted."""
        return self.count(code_of(error))

    def coordinator_code(self, error: BaseException) -> Code:
        """The same in an answer about a group."""
        code = code_of(error)
        return self.count(OF_COORDINATOR.get(code, code))

    def count(self, code: Code) -> Code:
        errors = self.shared.counts.errors
        errors[code.name] = errors.get(code.name, 0) + 1
        return code
