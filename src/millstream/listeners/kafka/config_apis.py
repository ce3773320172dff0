"""Configs by Kafka's administration: described with all their defaults, and changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.listeners.kafka import offsets_topic
from millstream.listeners.kafka.apis import Api, control
from millstream.listeners.kafka.codes import message_of
from millstream.listeners.kafka.configs import (
    Config,
    describe,
    describe_internal,
    read_configs,
    set_for,
    with_http,
)
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from millstream.broker.topics import Topic
    from millstream.listeners.kafka.apis import Call
    from millstream.listeners.kafka.context import Context

# What a config belongs to.
TOPIC, BROKER = 2, 4
# What is to be done with one; the other two are for lists of several items, and we have none.
SET, DELETE = 0, 1
# Resources that one request describes, each with some sixty configs: their answer is encoded in one
# go. And how many of them are described in one turn of the loop.
DESCRIBED_MAX = 1000
DESCRIBED_IN_TURN = 10


def config_apis(context: Context) -> list[Api]:
    return [
        control(
            DescribeConfigsRequest,
            (0, 4),
            lambda call, asked: follow(_describe(context, call, asked)),
        ),
        control(
            AlterConfigsRequest,
            (0, 2),
            lambda _, asked: follow(_alter(context, asked, AlterConfigsResponse, _all_of)),
        ),
        control(
            IncrementalAlterConfigsRequest,
            (0, 1),
            lambda _, asked: follow(
                _alter(context, asked, IncrementalAlterConfigsResponse, _some_of)
            ),
        ),
    ]


# ---- DescribeConfigs


def _describe(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    Result = DescribeConfigsResponse.DescribeConfigsResult  # noqa: N806  a class
    with_synonyms = call.version >= 1 and asked.include_synonyms
    with_about = call.version >= 3 and asked.include_documentation
    results = []
    wanted = _wanted(asked)
    for at, ((kind, name), keys) in enumerate(wanted.items()):
        if at and at % DESCRIBED_IN_TURN == 0:
            yield context.pause()
        code, message = Code.NONE, None
        configs: list[Config] = []
        try:
            if len(wanted) > DESCRIBED_MAX:
                raise _NoResource(f"a request describes at most {DESCRIBED_MAX} resources")
            configs = _of(context, call, kind, name)
        except MillstreamError as error:
            code, message = context.code(error), message_of(error)
        except _NoResource as error:
            code, message = context.count(Code.INVALID_REQUEST), str(error)
        results.append(
            Result(
                error_code=code,
                error_message=message,
                resource_type=kind,
                resource_name=name,
                configs=[
                    _shown(config, with_synonyms, with_about)
                    for config in configs
                    if keys is None or config.name in keys
                ],
            )
        )
    return DescribeConfigsResponse(throttle_time_ms=0, results=results)


class _NoResource(Exception):
    """Configs of something that has none here."""


def _wanted(asked: Any) -> dict[tuple[int, str], set[str] | None]:
    """Each resource once, with the configs that are wanted of it; None is all."""
    wanted: dict[tuple[int, str], set[str] | None] = {}
    for one in asked.resources:
        place = (one.resource_type, one.resource_name)
        keys = wanted.setdefault(place, set())
        if one.configuration_keys is None or keys is None:
            wanted[place] = None
        else:
            keys.update(one.configuration_keys)
    return wanted


def _of(context: Context, call: Call, kind: int, name: str) -> list[Config]:
    if kind == TOPIC and name == offsets_topic.NAME:
        return describe_internal()
    if kind == TOPIC:
        topic = context.broker.topics.get(name)
        return describe(topic, context.broker.topics.batch_bytes_max(topic))
    if kind != BROKER:
        raise _NoResource(f"there are no configs of resources of type {kind}")
    if name not in ("", str(context.node_id)):
        raise _NoResource(f"there is one broker, {context.node_id}")
    return with_http(context.broker_configs, context.http_url(call))


def _shown(config: Config, with_synonyms: bool, with_about: bool) -> Any:
    Result = DescribeConfigsResponse.DescribeConfigsResult  # noqa: N806  a class
    Shown = Result.DescribeConfigsResourceResult  # noqa: N806  a class
    Synonym = Shown.DescribeConfigsSynonym  # noqa: N806  a class
    itself = Synonym(name=config.name, value=config.value, source=config.source)
    return Shown(
        name=config.name,
        value=config.value,
        read_only=config.is_read_only,
        config_source=config.source,
        is_default=config.is_default,
        is_sensitive=False,
        synonyms=[itself] if with_synonyms else [],
        config_type=config.kind,
        documentation=config.about if with_about else None,
    )


# ---- AlterConfigs, IncrementalAlterConfigs


def _alter(
    context: Context,
    asked: Any,
    response: Any,
    changes_of: Callable[[Topic, Any], dict[str, str | None]],
) -> Generator[Pending[Any], Any, Any]:
    results = []
    topics = context.broker.topics
    for one in asked.resources:
        code, message = Code.NONE, None
        try:
            if one.resource_type != TOPIC:
                raise _NoResource("only topics have configs that can be changed at run time")
            topic = topics.get(one.resource_name)
            settings = read_configs(changes_of(topic, one.configs))
            if asked.validate_only:
                topics.imagine_settings(topic.name, settings)
            else:
                yield topics.alter(topic.name, settings)
        except MillstreamError as error:
            code, message = context.code(error), message_of(error)
        except _NoResource as error:
            code, message = context.count(Code.INVALID_REQUEST), str(error)
        Result = response.AlterConfigsResourceResponse  # noqa: N806  a class
        results.append(
            Result(
                error_code=code,
                error_message=message,
                resource_type=one.resource_type,
                resource_name=one.resource_name,
            )
        )
    return response(throttle_time_ms=0, responses=results)


def _all_of(topic: Topic, configs: Any) -> dict[str, str | None]:
    """What is not named goes back to its default."""
    return dict.fromkeys(set_for(topic)) | {one.name: one.value for one in configs}


def _some_of(topic: Topic, configs: Any) -> dict[str, str | None]:
    del topic
    changes: dict[str, str | None] = {}
    for one in configs:
        if one.config_operation not in (SET, DELETE):
            raise _NoResource(f"{one.name} has one value here; set it or delete it")
        changes[one.name] = one.value if one.config_operation == SET else None
    return changes
