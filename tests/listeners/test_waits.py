"""Who waits for messages over HTTP: how many may, and how each wait ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream.engine.pending import Pending
from millstream.errors import Busy, ParameterInvalid, Stopping
from millstream.listeners.http.parameters import Parameters, whole
from millstream.listeners.http.waits import Waits


class Client:
    on_lost: Callable[[], None] | None = None


class Wait:
    """Ends as those of the broker do: cancelled, it is done with False."""

    def __init__(self) -> None:
        self.pending: Pending[bool] = Pending()

    def cancel(self) -> None:
        self.pending.succeed(False)


def test_a_wait_ends_with_what_came() -> None:
    waits, client, wait = Waits(), Client(), Wait()
    outcome = waits.until(client, wait)
    assert (len(waits), outcome.is_done) == (1, False)
    wait.pending.succeed(True)
    assert (outcome.result(), len(waits), client.on_lost) == (True, 0, None)


def test_a_client_that_goes_away_is_not_answered() -> None:
    waits, client, wait = Waits(), Client(), Wait()
    outcome = waits.until(client, wait)
    assert client.on_lost is not None
    client.on_lost()
    assert (len(waits), wait.pending.is_done, outcome.is_done) == (0, True, False)


def test_a_stop_ends_all_waits_with_nothing_and_lets_nobody_wait() -> None:
    waits = Waits()
    outcomes = [waits.until(Client(), Wait()) for _ in range(3)]
    waits.drain()
    outcomes.append(waits.until(Client(), Wait()))
    assert [one.result() for one in outcomes] == [False] * 4
    with pytest.raises(Stopping):
        waits.enter(lambda: None)


def test_one_more_than_the_limit_is_refused_and_those_before_stay() -> None:
    waits = Waits(limit=2)
    first = [waits.until(Client(), Wait()) for _ in range(2)]
    late = Wait()
    refused = waits.until(Client(), late)
    assert isinstance(refused.error, Busy)
    assert refused.error.retriable
    assert late.pending.is_done
    assert not any(one.is_done for one in first)
    with pytest.raises(Busy):
        waits.check_room()


def test_a_held_wait_counts_until_it_is_over() -> None:
    waits, client, wait = Waits(limit=1), Client(), Wait()
    waits.hold(client, wait)
    with pytest.raises(Busy):
        waits.check_room()
    wait.pending.succeed(True)
    waits.check_room()
    lost, other = Client(), Wait()
    waits.hold(lost, other)
    assert lost.on_lost is not None
    lost.on_lost()
    assert (len(waits), other.pending.is_done) == (0, True)


@pytest.mark.parametrize("text", ["1_0", "١", "+1", " 1", "1 ", "0x1", "1.0", "", "-", "1e3"])
def test_a_whole_number_has_plain_digits(text: str) -> None:
    with pytest.raises(ParameterInvalid):
        whole("limit", text, -10, 10**6)


def test_a_whole_number_lies_within_its_bounds() -> None:
    assert [whole("limit", text, -1, 5) for text in ("-1", "0", "5", "05")] == [-1, 0, 5, 5]
    for text in ("-2", "6", "9" * 20):
        with pytest.raises(ParameterInvalid):
            whole("limit", text, -1, 5)


@pytest.mark.parametrize(
    "query", [b"a=1&a=2", b"b=1", b"a=%FF", b"&".join([b"a=1"] * 101), b"%FF=1"]
)
def test_a_query_names_what_is_known_once_and_in_utf8(query: bytes) -> None:
    with pytest.raises(ParameterInvalid):
        Parameters(query, ("a",))


def test_raw_parameters_may_be_any_bytes_and_others_given_often() -> None:
    found = Parameters(b"key=%FF+%00&h=1&h=2", ("key", "h"), many=("h",), raw=("key",))
    assert found.text("key", "").encode(errors="surrogateescape") == b"\xff \x00"
    assert found.texts("h") == ["1", "2"]
