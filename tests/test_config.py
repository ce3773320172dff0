"""Settings: where they come from, what they may be, and what a user is told when they are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.config import BY_NAME, TABLE, Settings, load_settings, settings_in_force
from millstream.config_file import FILE_BYTES_MAX
from millstream.errors import SettingInvalid
from millstream.kinds import Address, Duration, File, ListenAddress, Size, show_duration, show_size

NOTHING: Mapping[str, str] = {}


def load(
    flags: Mapping[str, str] = NOTHING,
    environment: Mapping[str, str] = NOTHING,
    file: Path | None = None,
) -> Settings:
    return load_settings(flags=flags, environment=environment, file=str(file) if file else None)


def complaint(**given: object) -> str:
    with pytest.raises(SettingInvalid) as caught:
        load(**given)  # type: ignore[arg-type]
    return caught.value.message


def test_defaults_are_valid_and_say_so() -> None:
    settings = load()
    assert settings.http == Address("127.0.0.1", 8080)
    assert settings.kafka is None
    assert settings.grpc is None
    assert settings.fsync == "every"
    assert settings.fsync_interval_ms == 1000
    assert settings.segment_bytes == 64 << 20
    assert settings.retention_age_ms == 7 * 86_400_000
    assert settings.retention_bytes is None
    assert settings.warnings == ()
    assert set(settings.origins.values()) == {"default"}
    assert set(settings.origins) == set(BY_NAME)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text('segment_bytes = "2M"\nnode_id = 2\nfsync = "none"\n')
    environment = {"MILLSTREAM_SEGMENT_BYTES": "3M", "MILLSTREAM_NODE_ID": "3"}
    settings = load({"segment_bytes": "4M"}, environment, file)
    assert (settings.segment_bytes, settings.node_id, settings.fsync) == (4 << 20, 3, "none")
    assert settings.origins["segment_bytes"] == "flag --segment-bytes"
    assert settings.origins["node_id"] == "environment MILLSTREAM_NODE_ID"
    assert settings.origins["fsync"] == f"file {file}"
    assert settings.origins["data"] == "default"


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text("node_id = 7\n")
    assert load(environment={"MILLSTREAM_CONFIG": str(file)}).node_id == 7


def test_every_wrong_value_is_reported_with_what_would_be_right(tmp_path: Path) -> None:
    file = tmp_path / "mill.yaml"
    file.write_text("segment_byts: 1M\nretention_age: 7 days\nkafka:\n  port: 1\ngrpc:\n")
    said = complaint(
        flags={"http": "8080", "segment_bytes": "1K"},
        environment={"MILLSTREAM_FSYNC": "sometimes"},
        file=file,
    )
    assert said.splitlines() == [
        "7 settings cannot be used:",
        f"  kafka = \"{{'port': 1}}\" (file {file}) is a section; "
        "settings are flat: write one `name: value` a line",
        f"  grpc = 'None' (file {file}) has no value; give it one, or leave the line out",
        f"  segment_byts = '1M' (file {file}) is not a setting; did you mean segment_bytes?",
        "  http = '8080' (flag --http) is not HOST:PORT; use HOST:PORT, such as "
        "127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080, or `off`",
        "  fsync = 'sometimes' (environment MILLSTREAM_FSYNC) is not one of the choices; "
        "use one of `every`, `interval`, `none`",
        "  segment_bytes = '1K' (flag --segment-bytes) is too small; "
        "use a size from 64K to 2G, such as 64K, 256M or 2G",
        f"  retention_age = '7 days' (file {file}) is not a duration; "
        "use a duration from 1s to 36525d, such as 500ms, 30s, 5m, 24h or 7d, or `unlimited`",
    ]


@pytest.mark.parametrize(
    ("flags", "blamed"),
    [
        ({"segment_bytes": "64K"}, "segment_bytes"),
        ({"segment_bytes": "2M", "index_interval_bytes": "4M"}, "index_interval_bytes"),
        ({"kafka_request_bytes_max": "1M"}, "kafka_request_bytes_max"),
        ({"message_bytes_max": "2M", "kafka_request_bytes_max": "2M"}, "kafka_request_bytes_max"),
        ({"batch_bytes_max": "8M", "journal_bytes": "4M"}, "journal_bytes"),
        ({"retention_bytes": "1M"}, "retention_bytes"),
        ({"retention_age": "1m"}, "retention_check_interval"),
        ({"http": "127.0.0.1:9090"}, "metrics"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    flags: dict[str, str], blamed: str
) -> None:
    said = complaint(flags=flags)
    assert said.startswith(f"one setting cannot be used:\n  {blamed} = ")
    assert "; use " in said


def test_a_listener_that_does_not_exist_yet_refuses_an_address() -> None:
    assert "this version has no" in complaint(flags={"grpc": "127.0.0.1:9000"})
    assert load({"grpc": "OFF"}).origins["grpc"] == "flag --grpc"


def test_both_pages_may_take_a_free_port() -> None:
    settings = load({"http": "127.0.0.1:0", "metrics": "127.0.0.1:0"})
    assert settings.http == settings.metrics == Address("127.0.0.1", 0)


def test_an_unknown_variable_is_a_warning_with_a_guess() -> None:
    settings = load(
        environment={"MILLSTREAM_NODE_IDD": "1", "MILLSTREAM_SERVER": "x", "OTHER": "y"}
    )
    assert settings.warnings == (
        "the environment variable MILLSTREAM_NODE_IDD is not a setting; "
        "did you mean MILLSTREAM_NODE_ID?",
    )


def test_yaml_takes_variables_and_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mill.yml"
    file.write_text(
        "data: ${HOME_OF_DATA:/srv/data}\nhttp: ${HOST}:${PORT:8081}\nkafka: off\n"
        "allowed_hosts: [a.example, .b.example]\nnode_id: 4\n"
    )
    settings = load(environment={"HOST": "127.0.0.2"}, file=file)
    assert settings.data == "/srv/data"
    assert settings.http == Address("127.0.0.2", 8081)
    assert settings.allowed_hosts == ("a.example", ".b.example")
    assert settings.kafka is None
    assert "uses HOST, which is not set" in complaint(file=file)


def test_a_variable_cannot_add_settings(tmp_path: Path) -> None:
    file = tmp_path / "mill.yaml"
    file.write_text("data: ${DATA}\n")
    settings = load(environment={"DATA": "/srv\nnode_id: 9"}, file=file)
    assert settings.node_id == 1


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.toml", b"data = ", "is not TOML"),
        ("a.yaml", b"data: [", "is not YAML"),
        ("a.yaml", b"- data", "is not a list of settings"),
        ("a.toml", b"\xff", "is not UTF-8 text"),
        ("a.ini", b"", "has an unknown extension"),
        ("a.toml", b"#" * (FILE_BYTES_MAX + 1), "is larger than"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert why in complaint(file=tmp_path / name)


def test_a_file_at_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"#" * FILE_BYTES_MAX)
    assert load(file=tmp_path / "a.toml").node_id == 1


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in complaint(file=tmp_path / "none.toml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("")
        assert set(load(file=tmp_path / name).origins.values()) == {"default"}


def test_what_is_shown_can_be_given_back() -> None:
    flags = {"http": "[::1]:80", "retention_bytes": "3G", "open_files": "1000"}
    settings = load(flags)
    shown = {row.name: value for row, value, _ in settings_in_force(settings)}
    again = load(shown)
    for setting in TABLE:
        assert getattr(again, setting.attribute) == getattr(settings, setting.attribute)


def test_every_row_says_what_it_causes_and_has_a_right_default() -> None:
    for setting in TABLE:
        assert setting.causes.endswith(".")
        setting.kind.parse(setting.default)
        assert setting.kind.expects


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("64K", 65536), ("2G", 2 << 30), ("1 MiB", 1 << 20), ("3mb", 3 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert Size().parse(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "12X", "G", "unlimited", "9" * 30, "٣K"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        Size().parse(text)


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("500ms", 500), ("30s", 30_000), ("5m", 300_000), ("24h", 86_400_000), ("7d", 604_800_000)],
)
def test_durations(text: str, duration_ms: int) -> None:
    assert Duration().parse(text) == duration_ms


@pytest.mark.parametrize("text", ["", "5", "1.5s", "s", "-1s", "7w", "unlimited", "9" * 20 + "d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        Duration().parse(text)


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back_as_it_was_shown(size: int) -> None:
    assert Size().parse(show_size(size)) == size


@given(st.integers(0, 10**12))
def test_a_duration_reads_back_as_it_was_shown(duration_ms: int) -> None:
    assert Duration().parse(show_duration(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("localhost", "is not HOST:PORT"),
        ("localhost:", "has no port"),
        ("localhost:http", "has no port"),
        ("localhost:65536", "has a port above 65535"),
        (":8080", "has no host"),
        ("::1:8080", "has a host that is no name and no address"),
        ("[localhost]:8080", "has brackets around what is no IPv6 address"),
        ("a b:8080", "has a host that is no name and no address"),
    ],
)
def test_what_is_no_address(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ListenAddress().parse(text)


def test_which_addresses_only_this_machine_reaches() -> None:
    inside = [Address(host, 1) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")]
    outside = [Address(host, 1) for host in ("0.0.0.0", "::", "10.0.0.1", "broker.example")]
    assert all(address.is_loopback for address in inside)
    assert not any(address.is_loopback for address in outside)


def test_a_file_where_the_data_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert "is a file, not a directory" in complaint(flags={"data": str(tmp_path / "data")})


def test_a_file_is_there_or_is_not_named(tmp_path: Path) -> None:
    kind = File()
    assert kind.parse("") is None
    (tmp_path / "cert.pem").write_text("")
    path = str(tmp_path / "cert.pem")
    assert kind.parse(path) == path
    assert kind.show(path) == path
    assert kind.show(None) == ""
    for text, why in (
        (str(tmp_path), "is a directory"),
        (str(tmp_path / "absent"), "is not there"),
        ("a\0b", "NUL"),
    ):
        with pytest.raises(ValueError, match=why):
            kind.parse(text)


@pytest.mark.parametrize(("named", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_a_certificate_and_its_key_come_together(tmp_path: Path, named: str, missing: str) -> None:
    (tmp_path / "file.pem").write_text("")
    with pytest.raises(SettingInvalid, match=f"{missing} = '' .default. is missing while {named}"):
        load_settings(flags={named: str(tmp_path / "file.pem")}, environment={})


def test_a_second_address_of_kafka_with_tls_needs_a_certificate_and_a_port_of_its_own(
    tmp_path: Path,
) -> None:
    flags = {"kafka": "127.0.0.1:9092", "kafka_tls": "127.0.0.1:9093"}
    with pytest.raises(SettingInvalid) as refusal:
        load_settings(flags=flags, environment={})
    assert str(refusal.value) == (
        "one setting cannot be used:\n"
        "  kafka_tls = '127.0.0.1:9093' (flag --kafka-tls) needs a certificate, and there is none; "
        "set tls_cert and tls_key too, or use `off`"
    )
    (tmp_path / "file.pem").write_text("")
    flags |= dict.fromkeys(("tls_cert", "tls_key"), str(tmp_path / "file.pem"))
    assert load_settings(flags=flags, environment={}).kafka_tls == Address("127.0.0.1", 9093)
    both = {"kafka": "127.0.0.1:9093"}
    with pytest.raises(SettingInvalid, match=r"kafka_tls = .* is where kafka listens too; use an"):
        load_settings(flags=flags | both, environment={})
    either = dict.fromkeys(("kafka", "kafka_tls"), "127.0.0.1:0")
    assert load_settings(flags=flags | either, environment={}).kafka is not None
    alone = load_settings(flags=flags | {"kafka": "off"}, environment={})
    assert (alone.kafka, alone.kafka_tls) == (None, Address("127.0.0.1", 9093))


LISTENERS = ("http", "kafka", "kafka_tls", "metrics")


@pytest.mark.parametrize(("first", "second"), list(combinations(LISTENERS, 2)))
@pytest.mark.parametrize(
    ("one", "other", "clashes"),
    [
        ("127.0.0.1:7000", "127.0.0.1:7000", True),
        ("127.0.0.1:7000", "0.0.0.0:7000", True),
        ("[::]:7000", "[::1]:7000", True),
        ("0.0.0.0:7000", "broker.example:7000", True),
        ("localhost:7000", "127.0.0.1:7000", True),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("127.0.0.1:7000", "127.0.0.1:7001", False),
        ("127.0.0.1:7000", "127.0.0.2:7000", False),
        ("0.0.0.0:7000", "[::]:7000", False),
    ],
)
def test_listeners_are_not_where_another_one_is(  # noqa: PLR0917  two listeners, two addresses
    tmp_path: Path, first: str, second: str, one: str, other: str, clashes: bool
) -> None:
    (tmp_path / "file.pem").write_text("")
    flags = {first: one, second: other}
    flags |= dict.fromkeys(("tls_cert", "tls_key"), str(tmp_path / "file.pem"))
    if not clashes:
        load_settings(flags=flags, environment={})
        return
    with pytest.raises(SettingInvalid, match=f"{second} = .* is where {first} listens too; use"):
        load_settings(flags=flags, environment={})


@pytest.mark.parametrize("name", ["kafka_advertised", "kafka_tls_advertised"])
@pytest.mark.parametrize("address", ["0.0.0.0:9092", "[::]:9092"])
def test_clients_are_not_told_to_go_everywhere(tmp_path: Path, name: str, address: str) -> None:
    (tmp_path / "file.pem").write_text("")
    flags = {"kafka_tls": "127.0.0.1:9093", name: address}
    flags |= dict.fromkeys(("tls_cert", "tls_key"), str(tmp_path / "file.pem"))
    with pytest.raises(SettingInvalid, match=f"{name} = .* is no address that a client could go"):
        load_settings(flags=flags, environment={})


def test_an_advertised_address_with_tls_needs_a_listener_with_tls() -> None:
    flags = {"kafka": "127.0.0.1:9092", "kafka_tls_advertised": "broker.example:9093"}
    with pytest.raises(SettingInvalid, match="is for clients of kafka_tls, which is `off`"):
        load_settings(flags=flags, environment={})
