import pytest

from slime.cluster.polling import WaitExpired, wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_returns_the_first_true_result() -> None:
    clock = Clock()
    answer = wait_for("x", lambda: clock.now >= 1 and "ready", 5, poll=0.4, clock=clock, sleep=clock.sleep)
    assert answer == "ready"
    assert clock.now == pytest.approx(1.2)


def test_expiry_names_the_wait_and_adds_the_report() -> None:
    clock = Clock()
    with pytest.raises(WaitExpired, match=r"waited 3 s \(deadline 3 s\) for engine 7\npid 12 alive"):
        wait_for("engine 7", lambda: False, 3, report=lambda: "pid 12 alive", clock=clock, sleep=clock.sleep)
    assert clock.now == pytest.approx(3)


def test_an_error_of_the_condition_propagates() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_for("x", lambda: 1 / 0, 1)
