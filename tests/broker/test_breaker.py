"""The circuit breaker of a group, with time moved by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.breaker import BUCKETS, Breaker


def breaker(*, settlings_min: int = 20, window_s: float = 60.0, percent: int = 50) -> Breaker:
    return Breaker(settlings_min, window_s, percent)


def opened(**options: int) -> Breaker:
    one = breaker(**options)
    one.settled(0.0, failed=20)
    assert one.is_open(0.0)
    return one


def test_half_of_twenty_failing_opens_it() -> None:
    one = breaker()
    one.settled(0.0, succeeded=10, failed=9)
    assert not one.is_open(0.0)
    one.settled(1.0, failed=1)
    assert one.is_open(1.0)
    assert (one.opened_s, one.openings) == (1.0, 1)


def test_nineteen_failures_do_not_open_it() -> None:
    one = breaker()
    one.settled(0.0, failed=19)
    assert not one.is_open(0.0)


def test_less_than_half_failing_does_not_open_it() -> None:
    one = breaker()
    one.settled(0.0, succeeded=101, failed=100)
    assert not one.is_open(0.0)


def test_settlings_older_than_the_window_do_not_count() -> None:
    one = breaker()
    one.settled(0.0, failed=19)
    one.settled(60.0, failed=1)
    assert not one.is_open(60.0)
    one.settled(60.5, failed=19)
    assert one.is_open(60.5)


def test_settlings_at_both_ends_of_the_window_count_together() -> None:
    one = breaker()
    one.settled(0.0, failed=10)
    one.settled(59.9, failed=10)
    assert one.is_open(59.9)


def test_old_successes_do_not_hide_new_failures() -> None:
    one = breaker()
    one.settled(0.0, succeeded=1_000_000)
    one.settled(61.0, failed=20)
    assert one.is_open(61.0)


def test_it_closes_when_half_of_those_since_then_succeed() -> None:
    one = opened()
    one.settled(100.0, succeeded=9, failed=10)
    assert one.is_open(100.0)
    one.settled(101.0, succeeded=1)
    assert not one.is_open(101.0)
    assert one.opened_s is None


def test_a_few_successes_alone_do_not_close_it() -> None:
    one = opened()
    one.settled(1.0, succeeded=19)
    assert one.is_open(1.0)
    one.settled(2.0, succeeded=1)
    assert not one.is_open(2.0)


def test_it_stays_open_while_nothing_succeeds_however_long() -> None:
    one = opened()
    for hour in range(1, 100):
        one.settled(hour * 3600.0, failed=7)
        assert one.is_open(hour * 3600.0)
    assert one.openings == 1


def test_slow_settlings_close_it_too() -> None:
    one = opened()
    for minute in range(1, 21):
        one.settled(minute * 120.0, succeeded=1)
    assert not one.is_open(20 * 120.0)


def test_an_outage_of_hours_is_over_after_a_few_successes() -> None:
    one = opened()
    for second in range(10_000):
        one.settled(float(second), failed=10)
    successes = 0
    while one.is_open(10_000.0):
        one.settled(10_000.0, succeeded=1)
        successes += 1
    assert successes <= 40


def test_after_it_closed_it_judges_anew() -> None:
    one = opened()
    one.settled(1.0, succeeded=20)
    one.settled(2.0, failed=19)
    assert not one.is_open(2.0)
    one.settled(3.0, failed=1)
    assert one.is_open(3.0)
    assert one.openings == 2


def test_a_low_threshold_needs_as_many_successes_to_close() -> None:
    one = opened(percent=10)
    one.settled(1.0, succeeded=89, failed=11)
    assert one.is_open(1.0)
    one.settled(2.0, succeeded=200)
    assert not one.is_open(2.0)


def test_where_all_have_to_fail_half_have_to_succeed() -> None:
    one = opened(percent=100)
    one.settled(1.0, succeeded=9, failed=11)
    assert one.is_open(1.0)
    one.settled(1.0, succeeded=5)
    assert not one.is_open(1.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 30, allow_nan=False), st.integers(0, 30), st.integers(0, 30)),
        max_size=200,
    ),
    st.integers(1, 50),
    st.integers(1, 100),
)
def test_it_opens_when_the_window_says_so_and_takes_little_memory(
    steps: list[tuple[float, int, int]], settlings_min: int, percent: int
) -> None:
    """Against all settlings kept one by one. The window is exact to a bucket: where the answers
    with and without the oldest bucket differ, either is right."""
    one = breaker(settlings_min=settlings_min, percent=percent)
    seen: list[tuple[float, int, int]] = []
    now = 0.0
    for pause, succeeded, failed in steps:
        now += pause
        was_open = one.is_open(now)
        one.settled(now, succeeded=succeeded, failed=failed)
        assert len(one._buckets) <= BUCKETS + 2
        if was_open:
            if not one.is_open(now):
                seen = []
            continue
        seen.append((now, succeeded, failed))
        answers = {
            _should_open(seen, now - window, settlings_min, percent)
            for window in (60.0, 60.0 * (1 - 1 / BUCKETS))
        }
        assert one.is_open(now) in answers or (len(answers) == 1 and _is_near(seen, now))


def _should_open(
    seen: list[tuple[float, int, int]], after: float, settlings_min: int, percent: int
) -> bool:
    succeeded = sum(one[1] for one in seen if one[0] > after)
    failed = sum(one[2] for one in seen if one[0] > after)
    total = succeeded + failed
    return total >= settlings_min and failed * 100 >= percent * total


def _is_near(seen: list[tuple[float, int, int]], now: float) -> bool:
    """Whether a settling lies where the bucket that ends may or may not hold it."""
    return any(now - 60.0 <= one[0] <= now - 59.0 for one in seen)
