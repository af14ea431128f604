"""The reference clock: fixed work, one factor, and only where it is asked for."""

from __future__ import annotations

import pytest

from runtime.reference import Pace, Reference


def test_the_work_is_the_same_whenever_it_is_done() -> None:
    first, second = Reference(), Reference()
    tokens = first.work()
    assert len(set(tokens)) <= 8 and tokens == first.work() == second.work()


def test_a_machine_twice_as_slow_has_half_the_factor() -> None:
    pace = Pace(1000, window=3)
    for times, factor in (((500, 500, 900), 2.0), ((1000, 1000, 1800), 1.0)):
        pace._times_ns.clear()
        pace._times_ns.extend(times)
        assert pace.factor == factor, "the median counts, not the hiccup"


def test_a_look_is_due_after_so_much_work_and_not_before() -> None:
    pace = Pace(1000, every_ns=100, window=1)
    assert not pace.is_due(60) and pace.is_due(60)
    pace.measure()
    assert not pace.is_due(60)


def test_no_nominal_time_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pace(0)
