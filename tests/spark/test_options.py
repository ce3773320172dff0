"""Options are checked together, and each error names the option, its value and what is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.errors import OptionInvalid
from millstream.spark.options import BROKER_ROWS, SOURCE_ROWS, WITHOUT_EFFECT
from millstream.spark.positions import EARLIEST, LATEST
from millstream.spark.source_options import SourceOptions, read_source_options

DOCS = Path(__file__).parent.parent.parent / "docs" / "spark.md"


RIGHT_SCHEMAS = [
    "id BIGINT, total DOUBLE",
    "id: bigint not null comment 'its (own), <id>', `odd-``name` string",
    "a array<struct<b: map<string, array<int>>, c decimal(12, 2)>>, d Timestamp_NTZ",
    "name STRING COLLATE UNICODE NOT NULL, at TIME(3)",
    "comment string, not int, `größe` float, 2nd int",
]


def read(is_stream: bool | None = False, /, **given: str) -> SourceOptions:
    """`__` stands for a dot."""
    named = {name.replace("__", "."): text for name, text in given.items()}
    which = {"subscribe", "subscribePattern", "assign"} & named.keys()
    return read_source_options(
        named if which else {"subscribe": "t"} | named, {}, is_stream=is_stream
    )


def refusal(is_stream: bool | None = False, /, **given: str) -> OptionInvalid:
    with pytest.raises(OptionInvalid) as caught:
        read(is_stream, **given)
    return caught.value


def test_a_query_needs_no_more_than_a_topic() -> None:
    options = read()
    assert options.topics == ("t",)
    assert options.place.url == "http://127.0.0.1:8080"
    assert options.starting.kind == "earliest"
    assert options.ending.kind == "latest"
    assert options.is_failing_on_loss
    assert options.schema.startswith("`key` BINARY, `value` BINARY, `topic` STRING, ")


def test_a_stream_starts_at_the_end_and_a_batch_at_the_start() -> None:
    assert read(True).starting.kind == "latest"
    assert read(False).starting.kind == "earliest"


def test_names_of_options_have_no_case() -> None:
    assert read(MAXOFFSETSPERTRIGGER="5", SubScribe="a, b").max_offsets == 5
    assert read_source_options({"SUBSCRIBE": "a, b"}, {}, is_stream=True).topics == ("a", "b")


def test_the_environment_names_a_broker_when_no_option_does() -> None:
    there = {"MILLSTREAM_SERVER": "http://example:1"}
    assert read_source_options({"subscribe": "t"}, there, is_stream=True).place.url == (
        "http://example:1"
    )
    with_servers = {"subscribe": "t", "servers": "k:9092"}
    assert read_source_options(with_servers, there, is_stream=True).place.url is None


def test_a_time_comes_before_times_and_those_before_offsets() -> None:
    by_offsets = {"startingOffsets": "earliest"}
    by_times = by_offsets | {"startingOffsetsByTimestamp": '{"t": {"0": 5}}'}
    by_time = by_times | {"startingTimestamp": "7"}
    assert read(**by_offsets).starting.kind == "earliest"
    assert read(**by_times).starting.numbers == {("t", 0): 5}
    assert read(**by_time).starting.timestamp_ms == 7


def test_offsets_are_read_with_their_words() -> None:
    limit = read(True, startingOffsets='{"t": {"0": 23, "1": -2}, "u": {"0": -1}}').starting
    assert limit.numbers == {("t", 0): 23, ("t", 1): EARLIEST, ("u", 0): LATEST}


WRONG = [
    ({"subscrib": "t"}, "subscrib", "did you mean 'subscribe'"),
    ({"maxOffsetPerTrigger": "5"}, "maxOffsetPerTrigger", "did you mean 'maxOffsetsPerTrigger'"),
    ({"subscribe": " , "}, "subscribe", "use topics such as"),
    ({"subscribePattern": "("}, "subscribePattern", "no regular expression"),
    ({"assign": "[]"}, "assign", '{"orders": [0, 1]}'),
    ({"assign": '{"t": [-1]}'}, "assign", '{"t": [0]}'),
    ({"assign": "{}"}, "assign", "names none"),
    ({"subscribe": "t", "assign": '{"t": [0]}'}, "assign", "give only one of"),
    ({"minPartitions": "0"}, "minPartitions", "a whole number from 1"),
    ({"maxRecordsPerPartition": "none"}, "maxRecordsPerPartition", "a whole number from 1"),
    ({"maxTriggerDelay": "soon"}, "maxTriggerDelay", "such as 500ms"),
    ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger", "a size from"),
    ({"failOnDataLoss": "perhaps"}, "failOnDataLoss", "true or false"),
    ({"startingOffsets": "first"}, "startingOffsets", "earliest, latest, committed"),
    ({"startingOffsets": "{"}, "startingOffsets", "no JSON"),
    ({"startingOffsets": '{"t": {"a": 1}}'}, "startingOffsets", "partitions are numbers"),
    ({"startingOffsets": '{"t": {"0": -3}}'}, "startingOffsets", "whole numbers from -2"),
    ({"startingOffsets": '{"t": 5}'}, "startingOffsets", 'write {"t": {"0": 23}}'),
    ({"startingOffsets": "committed"}, "startingOffsets", "name one with groupId"),
    ({"endingOffsets": "earliest"}, "endingOffsets", "use latest"),
    ({"startingTimestamp": "yesterday"}, "startingTimestamp", "a whole number from 0"),
    ({"startingOffsetsByTimestamp": '{"t": {"0": -1}}'}, "startingOffsetsByTimestamp", "from 0"),
    (
        {"startingOffsetsByTimestampStrategy": "none"},
        "startingOffsetsByTimestampStrategy",
        "`error`, `latest`",
    ),
    ({"columns": "key,worth"}, "columns", "has 'worth', and there is no such column"),
    ({"valueFormat": "xml"}, "valueFormat", "`bytes`, `text`, `json`"),
    ({"valueFormat": "json"}, "valueFormat", "name the fields"),
    ({"valueSchema": "a INT"}, "valueSchema", "set it to json"),
    ({"access": "disk"}, "access", "`auto`, `wire`, `files`"),
    ({"servers": "a:9092, broker"}, "servers", "has 'broker', which is no address; use one such"),
    ({"servers": "http://a:9092"}, "servers", "has 'http://a:9092', which is no address; use"),
    ({"servers": "a:1", "kafka.bootstrap.servers": "b:1"}, "kafka.bootstrap.servers", "one of"),
    ({"server": "broker:8080"}, "server", "such as http://127.0.0.1:8080"),
    ({"ca": "/nowhere/ca.pem"}, "ca", "no such file"),
    ({"groupId": "my group"}, "groupId", "'my group', which is no name of a group; use 1 to 255"),
    ({"kafka.group.id": "__mine"}, "kafka.group.id", "'__mine', which is no name of a group"),
    ({"groupId": "a", "kafka.group.id": "b"}, "kafka.group.id", "give one of both"),
    ({"kafka.auto.offset.reset": "earliest"}, "kafka.auto.offset.reset", "set startingOffsets"),
    ({"kafka.key.deserializer": "x"}, "kafka.key.deserializer", "keys are given as bytes"),
    ({"kafka.value.deserializer": "x"}, "kafka.value.deserializer", "valueFormat"),
    ({"kafka.enable.auto.commit": "true"}, "kafka.enable.auto.commit", "name a groupId"),
    ({"kafka.interceptor.classes": "x"}, "kafka.interceptor.classes", "Java classes"),
    ({"kafka.sasl.mechanism": "PLAIN"}, "kafka.sasl.mechanism", "no SASL"),
    ({"kafka.sasl.login.class": "x"}, "kafka.sasl.login.class", "no SASL"),
    ({"kafka.security.protocol": "SASL_SSL"}, "kafka.security.protocol", "needs SASL"),
    ({"kafka.security.protocol": "sasl_plaintext"}, "kafka.security.protocol", "without SASL"),
    ({"kafka.security.protocol": "tls"}, "kafka.security.protocol", "`ssl` or `plaintext`"),
    ({"kafka.partitioner.class": "x"}, "kafka.partitioner.class", "the column `partition`"),
    (
        {"kafka.ssl.endpoint.identification.algorithm": ""},
        "kafka.ssl.endpoint.identification.algorithm",
        "names in certificates are always checked",
    ),
    ({"kafka.ssl.truststore.password": "x"}, "kafka.ssl.truststore.password", "with `ca`"),
    ({"kafka.ssl.key.password": "x"}, "kafka.ssl.key.password", "certificates of clients"),
    ({"kafka.ssl.cipher.suites": "x"}, "kafka.ssl.cipher.suites", "as Python's own"),
    ({"kafka.fetch.min.byte": "1"}, "kafka.fetch.min.byte", "'kafka.fetch.min.bytes'"),
    ({"kafka.foo.bar": "1"}, "kafka.foo.bar", "no such option; Kafka's clients have settings"),
    # What was written is what is said.
    ({"subscribe": "t,  u", "assign": '{"t":[0]}'}, "assign", """is '{"t":[0]}', and assign and"""),
    ({"assign": '{"t":[-1]}'}, "assign", """is '{"t":[-1]}', and 't' has no list"""),
    ({"startingOffsets": '{"t":5}'}, "startingOffsets", """is '{"t":5}', and"""),
    (
        {"startingOffsetsByTimestamp": '{"t":{"0":-1}}'},
        "startingOffsetsByTimestamp",
        """is '{"t":{"0":-1}}', and""",
    ),
]


@pytest.mark.parametrize(("given", "name", "right"), WRONG)
def test_a_wrong_option_is_named_with_what_would_be_right(
    given: dict[str, str], name: str, right: str
) -> None:
    error = refusal(**{key.replace(".", "__"): text for key, text in given.items()})
    assert error.fields["option"] == name
    assert re.search(f"option {re.escape(name)} (is|has) ", error.message)
    assert right in error.message


WRONG_BATCHES = [
    ({"startingOffsets": "latest"}, "startingOffsets"),
    ({"startingOffsets": '{"t": {"0": -1}}'}, "startingOffsets"),
    ({"endingOffsets": "earliest"}, "endingOffsets"),
    ({"endingOffsets": '{"t": {"0": -2}}'}, "endingOffsets"),
    ({"startingOffsets": '{"t": {"0": 5}}', "endingOffsets": '{"t": {"0": 4}}'}, "endingOffsets"),
    ({"startingOffsets": '{"t": {"0": 5}}', "endingOffsets": '{"t": {"1": 9}}'}, "endingOffsets"),
    ({"startingTimestamp": "5", "endingTimestamp": "4"}, "endingTimestamp"),
    (
        {"startingTimestamp": "5", "endingOffsetsByTimestamp": '{"t": {"0": 5, "1": 4}}'},
        "endingOffsetsByTimestamp",
    ),
    (
        {"startingOffsetsByTimestamp": '{"t": {"0": 5, "1": 4}}', "endingTimestamp": "4"},
        "endingTimestamp",
    ),
]


def test_of_several_offsets_the_one_that_is_wrong_is_named() -> None:
    ends = {"startingOffsets": '{"t": {"0": 5, "1": 7}}', "endingOffsets": '{"t":{"0":5,"1":6}}'}
    assert refusal(**ends).message.startswith(
        "the option endingOffsets has '6' for t/1, and startingOffsets has 7; end at or after"
    )
    others = {"startingOffsets": '{"t": {"0": 5}}', "endingOffsets": '{"t": {"1": 9}}'}
    assert refusal(**others).message == (
        "the option endingOffsets is for t/1, and startingOffsets is for t/0; name the same "
        "partitions"
    )
    times = {"startingOffsetsByTimestamp": '{"t": {"0": 5}}', "endingTimestamp": "4"}
    assert refusal(**times).message.startswith(
        "the option endingTimestamp is '4', and startingOffsetsByTimestamp has 5 for t/0; end at"
    )
    times = {"startingTimestamp": "5", "endingOffsetsByTimestamp": '{"t": {"0": 4}}'}
    assert refusal(**times).message.startswith(
        "the option endingOffsetsByTimestamp has '4' for t/0, and startingTimestamp is 5; end at"
    )
    assert refusal(True, endingOffsetsByTimestamp='{"t":{"0":5}}').message.startswith(
        """the option endingOffsetsByTimestamp is '{"t":{"0":5}}', and streams do not end"""
    )


def test_an_address_that_only_the_environment_names_is_named_by_it() -> None:
    with pytest.raises(OptionInvalid, match=r"^MILLSTREAM_SERVER, .* is 'broker:1', which is no"):
        read_source_options({"subscribe": "t"}, {"MILLSTREAM_SERVER": "broker:1"}, is_stream=None)


def test_who_names_no_topics_learns_how_also_for_a_table() -> None:
    with pytest.raises(OptionInvalid) as caught:
        read_source_options({}, {}, is_stream=None)
    assert caught.value.message == (
        "the option subscribe is missing, and so are the others; give one of assign, subscribe, "
        "subscribePattern. A table has them as `CREATE TABLE … USING millstream OPTIONS (subscribe "
        "'orders')`, without a list of columns"
    )


def test_another_broker_has_a_rule_of_its_own_for_names_of_groups() -> None:
    assert read(servers="kafka:9092", groupId="my group").group == "my group"


@pytest.mark.parametrize(("given", "name"), WRONG_BATCHES)
def test_a_batch_does_not_begin_at_its_end(given: dict[str, str], name: str) -> None:
    assert refusal(**given).fields["option"] == name


def test_a_batch_may_end_at_its_start() -> None:
    read(False, startingTimestamp="5", endingTimestamp="5")
    read(False, startingTimestamp="5", endingOffsetsByTimestamp='{"t": {"0": 5}}')
    # Which of them is first only the broker can say.
    read(False, startingOffsets='{"t": {"0": 9}}', endingTimestamp="5")


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_does_not_end(name: str) -> None:
    value = {"endingOffsets": "latest", "endingTimestamp": "5"}.get(name, '{"t": {"0": 5}}')
    error = refusal(True, **{name: value})
    assert error.fields["option"] == name
    assert "streams do not end" in error.message


def test_the_least_of_a_trigger_is_not_above_the_most() -> None:
    error = refusal(True, minOffsetsPerTrigger="6", maxOffsetsPerTrigger="5")
    assert error.fields["option"] == "minOffsetsPerTrigger"
    assert "maxOffsetsPerTrigger is 5" in error.message


def test_tuning_of_kafkas_consumers_does_no_harm() -> None:
    for name in WITHOUT_EFFECT:
        read_source_options({"subscribe": "t", name: "1"}, {}, is_stream=True)


def test_options_of_kafkas_producers_that_change_nothing_are_taken() -> None:
    given = {
        "kafka.enable.idempotence": "true",
        "kafka.metrics.recording.level": "DEBUG",
        "KAFKA.Metric.Reporters": "x",
    }
    read_source_options({"subscribe": "t"} | given, {}, is_stream=True)


def test_tables_in_the_catalog_bring_options_of_sparks_own() -> None:
    given = {"provider": "millstream", "option.SUBSCRIBE": "t", "path": "x"}
    assert read_source_options(given, {}, is_stream=False).topics == ("t",)
    both = given | {"option.startingTimestamp": "1", "startingtimestamp": "2"}
    assert read_source_options(both, {}, is_stream=False).starting.timestamp_ms == 2


def test_a_table_may_have_options_of_the_sink() -> None:
    read_source_options({"subscribe": "t", "topic": "t"}, {}, is_stream=False)


def test_columns_are_chosen_and_ordered() -> None:
    assert read(columns="offset, KEY").columns == ("offset", "key")
    assert read(columns="offset, key, KEY").columns == ("offset", "key")
    assert read(columns="key", includeLane="true").columns == ("key", "lane")
    assert read(includeHeaders="true").columns[-1] == "headers"


def test_json_values_are_a_struct_and_what_does_not_fit_beside_it() -> None:
    options = read(valueFormat="json", valueSchema="id BIGINT, total DOUBLE")
    assert "`value` STRUCT<id BIGINT, total DOUBLE>" in options.schema
    assert options.columns[-1] == "_corrupt_record"
    strict = read(valueFormat="json", valueSchema="STRUCT<id: BIGINT>", valueMode="failfast")
    assert "`value` STRUCT<id: BIGINT>" in strict.schema
    assert "_corrupt_record" not in strict.columns


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("id BIGIT", "of the field id: there is no type 'BIGIT'; did you mean BIGINT?"),
        ("id BIGINT, tags ARRAY<STRING", "of the field tags: a '>' is missing before its end"),
        ("a STRUCT<b: STRUCT<c: INT>, d INT", "of the field a: a '>' is missing before its end"),
        ("STRUCT<a INT", "a '>' is missing before its end"),
        ("id BIGINT, id STRING", "the field 'id' is there twice"),
        ("a STRUCT<b INT, `b` INT>", "of the field a: the field 'b' is there twice"),
        ("id", "of the field id: a type is missing before its end"),
        ("id BIGINT,", "a field's name is missing before its end"),
        ("id BIGINT total DOUBLE", "of the field id: 'total' is too much after a type"),
        ("id BIGINT>, evil STRUCT<a INT", "'>' is too much"),
        ("order-id BIGINT", "the name order-… needs backquotes around it"),
        ("größe INT", "the name grö… needs backquotes around it"),
        ("total DECIMAL(50, 2)", "of the field total: a DECIMAL has 1 to 38 digits"),
        ("m MAP<INT, STRING>", "of the field m: the keys of a MAP are STRING in JSON"),
        ("name VARCHAR(5)", "of the field name: a value cannot be read as VARCHAR; use STRING"),
        ("name char(5)", "of the field name: a value cannot be read as CHAR; use STRING"),
        (
            "a STRUCT<b: CHARACTER>",
            "of the field a.b: a value cannot be read as CHARACTER; use STRING",
        ),
        ("m MAP<VARCHAR(5), INT>", "of the field m: a value cannot be read as VARCHAR; use STRING"),
        ("v ARRAY<VARIANT>", "of the field v: a value cannot be read as VARIANT; use STRING"),
        ("t INTERVAL", "of the field t: a value cannot be read as INTERVAL; use STRING"),
        (
            "t INTERVAL DAY TO SECOND",
            "of the field t: a value cannot be read as INTERVAL; use STRING",
        ),
        (
            "t INTERVAL YEAR(3) TO MONTH",
            "of the field t: a value cannot be read as INTERVAL; use STRING",
        ),
    ],
)
def test_a_wrong_schema_of_values_is_named_with_what_is_wrong(schema: str, why: str) -> None:
    error = refusal(valueFormat="json", valueSchema=schema)
    assert error.fields["option"] == "valueSchema"
    assert f"the option valueSchema is '{schema}', and {why}; write columns" in error.message


@pytest.mark.parametrize("schema", RIGHT_SCHEMAS)
def test_a_schema_that_spark_takes_is_taken(schema: str) -> None:
    assert read(valueFormat="json", valueSchema=schema).value_schema == schema


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900), ("500ms", 0.5), ("2h", 7200), ("1500", 1.5), ("3min", 180)]
)
def test_times_are_as_spark_writes_them(text: str, seconds: float) -> None:
    assert read(True, maxTriggerDelay=text).max_delay_s == seconds


def test_the_page_has_every_option() -> None:
    rows = re.findall(r"(?m)^\| `([^`]+)` \|", DOCS.read_text(encoding="utf-8"))
    for option in (*BROKER_ROWS, *SOURCE_ROWS):
        assert option.name in rows
