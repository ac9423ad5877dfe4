"""``slime.train``: a whole run as one call, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slime.api.arguments import Data, InputFolder, parse
from slime.api.table import Table
from slime.api.trainer import Trainer
from slime.registry import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from slime.api.trainer import Listener


@dataclass(frozen=True, repr=False)
class Result:
    """The metrics and files of a run, and its engines with the trained weights, as long as they are
    not closed.

    Attributes:
        trainer: The run. Its engines answer until :meth:`close`, the next :func:`slime.train`, or
            the program's end.
        history: The metrics of each step. ``result.history.column("rollout/raw_reward")`` is the
            reward curve.
        evaluations: The metrics of each evaluation.
        interrupted: Whether Ctrl-C ended the run before its last rollout.
    """

    trainer: Trainer
    history: Table
    evaluations: Table
    interrupted: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the run. A later run of the same name renames it."""
        return self.trainer.folder

    @property
    def checkpoints(self) -> list[Path]:
        """The snapshots, the newest last."""
        return self.trainer.checkpoints

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        rewards: list[float] = self.summary["reward_per_rollout"]
        return rewards

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the table at the end of a run."""
        from slime.observability.run_dir import RunDir

        figures: dict[str, Any] = find("summary", "figures")(RunDir(self.folder))
        return figures

    def generate(self, prompts: Any, n: int = 1, **sampling: object) -> Any:
        """Generate texts with the trained weights; see :meth:`Trainer.generate`."""
        return self.trainer.generate(prompts, n, **sampling)

    def sample(self, prompts: Any, n: int = 1, **sampling: object) -> Any:
        """Generate samples with token ids and log-probs; see :meth:`Trainer.sample`."""
        return self.trainer.sample(prompts, n, **sampling)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the reward of each step, the evaluations and the time of the phases.

        Args:
            path: Also write the picture to this PNG file.

        Returns:
            The figure, which a notebook shows.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (``pip install 'slime-rl[plots]'``).
        """
        summary = self.summary
        if path is not None:
            find("summary", "write_picture")(Path(path), summary)
        figure: Figure = find("summary", "picture")(summary)
        return figure

    def close(self) -> None:
        """End the processes of the run."""
        self.trainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "interrupted after" if self.interrupted else "complete:"
        return f"Result({state} {len(self.history)} steps in {self.folder})\n{self.history}"


def train(
    model: str | Path | None = None,
    data: Data | None = None,
    reward: str | Callable[..., Any] | None = None,
    *,
    callbacks: Sequence[Listener] = (),
    **flags: Any,
) -> Result:
    """Train a model, and return when the run is complete.

    The arguments are those of :class:`Trainer`. Ctrl-C ends the run after the current step, or at
    once if responses are being generated: the result then has what was trained until there, and its
    ``interrupted`` is True.

    Returns:
        The metrics, the snapshots, and the engines with the trained weights, which answer until
        ``result.close()``.

    Raises:
        ConfigError: With all problems of the arguments, files and functions at once, before
            anything is started.
    """
    # After this line there are processes, which must end if the run fails.
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
    """Print what :func:`train` would do with these arguments, without starting it; see ``slime
    train --dry-run``.

    Raises:
        ConfigError: With all problems at once.
    """
    from slime.cluster.checks import dry_run as report

    with InputFolder() as folder:
        report(parse({"model": model, "data": data, "reward": reward, **flags}, Path(folder)))
