"""What all handlers of the listener work with."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.listeners.kafka.codes import OF_COORDINATOR, code_of
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.broker.turns import Turns
    from millstream.engine.protocol import Engine
    from millstream.kinds import Address
    from millstream.listeners.kafka.apis import Call
    from millstream.listeners.kafka.configs import Config
    from millstream.listeners.kafka.connection import Shared

# The topic whose UUID is the cluster's: every data directory has its own.
CLUSTER_TOPIC = "__topics"


@dataclass(slots=True)
class Context:
    broker: Broker
    engine: Engine
    shared: Shared
    turns: Turns
    node_id: int
    # What clients are told to come to; None is where they came to already.
    advertised: Address | None = None
    fetch_bytes_max: int = 55 * 1024 * 1024
    # Its settings, as Kafka shows them.
    broker_configs: list[Config] = field(default_factory=list)
    _cluster_id: str = field(default="", init=False)

    @property
    def cluster_id(self) -> str:
        """As Kafka writes one: 16 bytes in base64, without padding."""
        if not self._cluster_id:
            uuid = next(one.uuid for one in self.engine.topics() if one.name == CLUSTER_TOPIC)
            self._cluster_id = base64.urlsafe_b64encode(uuid).rstrip(b"=").decode()
        return self._cluster_id

    def place(self, call: Call) -> Address:
        """Where this broker is, for a client."""
        return self.advertised or call.here

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
