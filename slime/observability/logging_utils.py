"""Documented import path of ``log(args, metrics, step_key)`` for users' logging functions.

The metrics of a run are written by its driver. A logging function runs in the process of the
rollout manager, so what it logs joins the metrics of the rollout or evaluation for which it was
called, and reaches all sinks with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
_targets: list[dict[str, float]] = []


@contextmanager
def logged_into(metrics: dict[str, float]) -> Iterator[None]:
    """Add what :func:`log` gets in this block to ``metrics``."""
    _targets.append(metrics)
    try:
        yield
    finally:
        _targets.pop()


def log(args: Args, metrics: Mapping[str, SupportsFloat], step_key: str = "rollout/step") -> None:
    """Add metrics to those of the current rollout or evaluation.

    Outside of a logging function there is nothing to add them to; then they are written to Python's
    log.

    Args:
        metrics: Numbers by name. The entry of the step is left out, since the run knows its step.
        step_key: Name of the step among the metrics, such as ``rollout/step``.

    Raises:
        ValueError: A metric is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name!r} is not a number: {value!r:.120}") from error
    numbers.pop(step_key, None)
    # The innermost block, since an evaluation may run inside a rollout.
    if _targets:
        _targets[-1].update(numbers)
    else:
        logger.info(numbers)
