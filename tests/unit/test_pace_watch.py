"""A paced run that measures the machine instead of the plan says so, once."""

from malleus_megatron.adapter.pace_watch import PaceWatch
from malleus_megatron.adapter.rows import BoundaryRow


def rows(calls: int, misses: int, worst: float) -> list[BoundaryRow]:
    healthy = BoundaryRow(pace_calls=float(calls))
    slow = BoundaryRow(pace_calls=float(calls), pace_misses=float(misses), pace_worst_ratio=worst)
    return [healthy, slow]


def test_the_first_iteration_warms_up() -> None:
    watch = PaceWatch()
    assert watch.look(rows(100, 50, 9.0)) is None
    assert watch.look(rows(200, 50, 9.0)) is None
    assert watch.misses == 0


def test_a_share_above_two_percent_is_told_once_with_the_numbers() -> None:
    watch = PaceWatch()
    watch.look(rows(100, 1, 1.5))
    message = watch.look(rows(200, 11, 2.5))
    assert message is not None
    assert "10 of 200 layer calls" in message
    assert "the worst 2.5 times" in message
    assert watch.look(rows(300, 111, 2.5)) is None
    assert watch.summary() == {"calls": 400, "misses": 110}


def test_a_stray_miss_is_counted_and_not_told() -> None:
    watch = PaceWatch()
    watch.look(rows(100, 0, 0.0))
    assert watch.look(rows(200, 1, 1.2)) is None
    assert watch.misses == 1
