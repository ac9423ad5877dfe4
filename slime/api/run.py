"""``slime.train``: a whole run as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.api.arguments import Data, InputFolder, parse
from slime.api.result import Result
from slime.api.trainer import Trainer

if TYPE_CHECKING:
    from slime.api.trainer import Listener


def train(
    model: str | Path | None = None,
    data: Data | None = None,
    reward: str | Callable[..., Any] | None = None,
    *,
    callbacks: Sequence[Listener] = (),
    **flags: Any,
) -> Result:
    """Train a model, and return when the run is complete.

    The arguments are those of :class:`Trainer`. Ctrl-C ends the run after the current step, or at once if responses are
    being generated: the result then has what was trained until there, and its ``interrupted`` is True.

    Returns:
        The metrics, the snapshots, and the engines with the trained weights, which answer until ``result.close()``.

    Raises:
        ConfigError: With all problems of the arguments, files and functions at once, before anything is started.
    """
    trainer = Trainer(model, data, reward, callbacks=callbacks, **flags)
    interrupted = False
    try:
        trainer.run()
    except KeyboardInterrupt:
        if not trainer.is_open:  # The second Ctrl-C.
            raise
        interrupted = True
    except BaseException:
        trainer.close(save=False)
        raise
    return Result(trainer, trainer.history, trainer.evaluations, interrupted)


def dry_run(
    model: str | Path | None = None,
    data: Data | None = None,
    reward: str | Callable[..., Any] | None = None,
    **flags: Any,
) -> None:
    """Print what :func:`train` would do with these arguments, without starting it; see ``slime train --dry-run``.

    Raises:
        ConfigError: With all problems at once.
    """
    from slime.cluster.checks import dry_run as report

    with InputFolder() as folder:
        report(parse({"model": model, "data": data, "reward": reward, **flags}, Path(folder)))
