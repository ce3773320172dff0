"""The broker's own messages: structured, to standard error, as JSON or for people.

A message is an event, in a few words, and fields: `log.info("listening", listener="http")`.
Libraries that use the standard `logging` come out in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor


def get_logger(part: str) -> FilteringBoundLogger:
    """The logger of a part of the house; its name is in every message."""
    logger: FilteringBoundLogger = structlog.get_logger(part=part)
    return logger


def configure_logs(level: str, form: Literal["json", "pretty", "auto"]) -> None:
    """Set up logging once, at the start of the process."""
    pretty = form == "pretty" or (form == "auto" and sys.stderr.isatty())
    render: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if pretty
        else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    if not pretty:
        # The pretty renderer shows tracebacks itself.
        shared.append(structlog.processors.format_exc_info)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _name_the_part],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(handlers=[handler], level=number, force=True)


def _name_the_part(_logger: object, _method: str, event: Any) -> Any:
    event["part"] = event["_record"].name
    return event


def _to_json(event: Any, **_: object) -> str:
    # Anything that JSON has no form for is shown as text: a message must never fail to be written.
    return msgspec.json.encode(event, enc_hook=str).decode()
