"""The arithmetic of the benchmark of the first curve, which needs neither TRL nor a model."""

from __future__ import annotations

import first_curve
import pytest


def test_when_the_curve_has_risen() -> None:
    """Steps of 5, 4, 3 and 2 seconds end at 100, so the first one at 91."""
    found = first_curve.curve_figures(0.15, [0.1, 0.2, 0.3, 0.2], [5.0, 4.0, 3.0, 2.0], 60.0, 100.0)
    assert (found["installed"], found["first_step"]) == (60.0, 91.0)
    assert (found["risen_at_step"], found["risen"]) == (3, 98.0)


@pytest.mark.parametrize(("rise", "step"), [(0.1, 2), (0.9, None)])
def test_a_curve_that_does_not_rise_has_no_time(rise: float, step: int | None) -> None:
    found = first_curve.curve_figures(rise, [0.1, 0.25], [1.0, 1.0], 1.0, 5.0)
    assert found["risen_at_step"] == step and (found["risen"] is None) == (step is None)
