"""What a finished run leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slime.api.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from slime.api.trainer import Trainer
    from slime.observability.summary import Summary


@dataclass(frozen=True, repr=False)
class Result:
    """The metrics and files of a run, and its engines with the trained weights, as long as they are not closed.

    Attributes:
        trainer: The run. Its engines answer until :meth:`close`, the next :func:`slime.train`, or the program's end.
        history: The metrics of each step. ``result.history.column("rollout/raw_reward")`` is the reward curve.
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
        return self.summary["reward_per_rollout"]

    @property
    def summary(self) -> Summary:
        """The figures of the table at the end of a run."""
        from slime.observability.run_dir import RunDir
        from slime.observability.summary import summarize

        return summarize(RunDir(self.folder))

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
        from slime.observability.charts import reward_curve, reward_curve_png

        summary = self.summary
        if path is not None:
            reward_curve_png(Path(path), summary)
        return reward_curve(summary)

    def close(self) -> None:
        """End the processes of the run."""
        self.trainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "interrupted after" if self.interrupted else "complete:"
        return f"Result({state} {len(self.history)} steps in {self.folder})\n{self.history}"
