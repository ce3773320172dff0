"""Names that look unused and are not: somebody outside this tree reads them."""

_.__signature__  # typer makes flags of it
_.__annotations__
_.grpc  # `mill config show` prints every field of Settings by its name in the table
_.retriable  # clients read it
_.peer_values  # in the JSON of `mill bench`
_.p50_ms  # `mill bench kafka` asks for these by the name of the share
_.p99_ms
_.eof_received  # the event loop calls these
_.get_buffer
_.buffer_updated
_.on_url  # the HTTP parser calls these
_.on_header
_.on_body
_.on_message_complete
_.on_response_complete  # uvicorn calls it
_.default_headers
_.more_body
_.connection_made
_.keep_alive  # uvicorn's cycles
_.disconnected
before_call  # schemathesis
_.rate_per_s  # `GET /v1/priority/stats` shows every field of what it is given
_.last_served_ms
_.oldest_age_ms
_.redelivered  # `GET /v1/reliability/stats` does so too
_.rejected  # and clients read it
_.parked
_.streamReader  # Spark calls these of a data source, of its readers and of its writers
_.streamWriter
_.pushFilters
_.initialOffset
_.latestOffset
_.reportLatestOffset
_.getDefaultReadLimit
_.prepareForTriggerAvailableNow
