"""What a program can do between the phases of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hooks import is_async

if TYPE_CHECKING:
    from slime.api.trainer import Trainer


class Callback:
    """Override what you need. All methods are called in the program's process, when the phase is
    complete.

    An exception ends :func:`slime.train`; in a loop of your own it comes out of
    :meth:`Trainer.step`, and the run goes on with the next call. To end a run after a step, call
    ``trainer.stop()``.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Engines and trainer have loaded the model."""

    def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """A rollout was trained, and the engines have the new weights."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """All evaluation sets were evaluated."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """A snapshot was written. With ``async_save``, only its copy in memory is complete."""

    def on_end(self, trainer: Trainer) -> None:
        """The run is complete or was stopped; its processes still answer."""


class OnStep(Callback):
    """A function of ``(trainer, metrics)`` that is called after each step."""

    def __init__(self, function: Callable[[Trainer, Mapping[str, float]], object]) -> None:
        self.function = function

    def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.function(trainer, metrics)


def as_callback(given: Callback | Callable[[Trainer, Mapping[str, float]], object]) -> Callback:
    """Return a callback, or one that calls the function ``given`` after each step.

    Raises:
        TypeError: It is neither.
    """
    # Refused before the start: during the run, it would be noticed after the first step.
    if isinstance(given, Callback):
        return given
    if not callable(given) or isinstance(given, type):
        raise TypeError(
            f"a callback is a slime.Callback or a function of (trainer, metrics), not {given!r:.80}"
        )
    if is_async(given):
        raise TypeError("a callback is called without await: use a plain def")
    return OnStep(given)
