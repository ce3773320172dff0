"""Names that look unused and are not: somebody outside this tree reads them."""

_.__signature__  # typer makes flags of it
_.__annotations__
_.lifespan  # uvicorn's server
_.should_exit
_.grpc  # `mill config show` prints every field of Settings by its name in the table
_.kafka
_.retriable  # clients read it
_.peer_values  # in the JSON of `mill bench`
_.eof_received  # the event loop calls it
_.keep_alive  # uvicorn's cycles
_.disconnected
