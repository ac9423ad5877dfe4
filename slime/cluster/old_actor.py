"""``--keep-old-actor``: which weights the copy holds that computes the old log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from slime.config.rollout import old_actor_lag

if TYPE_CHECKING:
    from slime.backends.base import ModelTag
    from slime.config.args import Args


class HoldsCopies(Protocol):
    """The part of :class:`~slime.cluster.train_group.TrainGroup` that is used here."""

    def refresh_old_actor(self, behind: bool) -> None: ...

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None: ...


class OldActor:
    """Keeps the copy ``old_actor`` equal to the weights that generated the rollout which is trained next.

    Where each rollout starts after the previous update, these are the weights that the engines hold. In the
    asynchronous loop the first rollout that is trained after an update had been generated before the update, with the
    weights from before it. The rollouts after it, until the next update, were generated with the engines' weights.

    Args:
        is_kept: ``--keep-old-actor``.
        lag: updates by which the first rollout after an update is behind, 0 or 1; see :func:`old_actor_lag`.
    """

    def __init__(self, is_kept: bool, lag: int = 0) -> None:
        self.is_kept, self.lag = is_kept, lag
        self._version = ""  # of the last update
        self._steps_behind: int | None = None
        """Steps since the last update that trained on the weights before it; None once the copy holds the engines'."""

    @classmethod
    def from_args(cls, args: Args, asynchronous: bool) -> OldActor:
        is_kept = bool(args.keep_old_actor)
        return cls(is_kept, (old_actor_lag(args) or 0) if asynchronous and is_kept else 0)

    def updated(self, actor: HoldsCopies, version: str) -> None:
        """The engines hold ``version`` of the weights that ``actor`` has; a repeated call does nothing."""
        if self.is_kept and version != self._version:
            self._version = version
            self._steps_behind = 0 if self.lag == 1 else None
            actor.refresh_old_actor(behind=self.lag == 1)

    def before_step(self, actor: HoldsCopies) -> None:
        """A rollout is about to be trained."""
        if self._steps_behind == 0:
            self._steps_behind = 1
        elif self._steps_behind == 1:
            actor.copy_weights("rollout_actor", "old_actor")
            self._steps_behind = None
