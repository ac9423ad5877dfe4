"""The training groups as the driver sees them: actor and critic, and whose turn on the accelerator it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import ObjectRef

    from slime.cluster.old_actor import OldActor
    from slime.cluster.step_log import StepLog
    from slime.cluster.train_group import TrainGroup
    from slime.config.args import Args


@dataclass(frozen=True)
class TrainerSettings:
    """``offload_train``: trainers move to CPU memory between their phases. ``colocated``: trainers or engines do, so
    both share accelerators."""

    offload_train: bool
    colocated: bool
    num_critic_only_steps: int
    ref_update_interval: int | None

    @classmethod
    def from_args(cls, args: Args) -> TrainerSettings:
        return cls(
            bool(args.offload_train),
            bool(args.offload_train or args.offload_rollout),
            args.num_critic_only_steps,
            args.ref_update_interval,
        )


class Trainer:
    """The training side of one run; used by the driver's main thread only.

    Args:
        actor: None in a run that does not train (``--debug-rollout-only``).
        critic: None without a critic.
        trained: the last rollout that the snapshot of a resumed run has trained.

    Attributes:
        trained: the last rollout whose training is complete; None before the first.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        actor: TrainGroup | None,
        critic: TrainGroup | None,
        old_actor: OldActor,
        log: StepLog,
        trained: int | None = None,
    ) -> None:
        self.settings, self.actor, self.critic, self.old_actor = settings, actor, critic, old_actor
        self.groups = [group for group in (actor, critic) if group is not None]
        self.trained = trained
        self._log = log

    def train(self, rollout_id: int, refs: Sequence[ObjectRef[Any]]) -> None:
        """Train on a rollout: first the critic, whose values the actor's advantages need, then the actor.

        The metrics go into the step's. The actor rests in the first ``--num-critic-only-steps`` rollouts.
        """
        assert self.actor is not None, "nothing trains with --debug-rollout-only"
        pending, values = self._log.pending, None
        if self.critic is not None:
            self.take_turn(self.critic)
            result = self.critic.train(rollout_id, refs)
            values = result["values"]
            pending.update(result["metrics"])
        if self.critic is None or rollout_id >= self.settings.num_critic_only_steps:
            self.take_turn(self.actor)
            self.old_actor.before_step(self.actor)
            result = self.actor.train(rollout_id, refs, values)
            pending.update(result["metrics"])
            pending.update({f"perf/{name}_time": seconds for name, seconds in result["timings"].items()})
        interval = self.settings.ref_update_interval
        if interval and (rollout_id + 1) % interval == 0:
            self.take_turn(self.actor)
            self.actor.copy_weights("actor", "ref")
        self.trained = rollout_id

    # --- colocated: who is on the accelerator ------------------------------------------------

    def take_turn(self, group: TrainGroup) -> None:
        """With ``--offload-train``: wake ``group`` after the other has gone to sleep.

        The accelerator never has to hold actor and critic at the same time.
        """
        if self.settings.offload_train:
            for other in self.groups:
                if other is not group:
                    other.sleep()
            group.wake()

    def wake(self) -> None:
        """With ``--offload-train``: wake the group that trains first."""
        if self.settings.offload_train and self.groups:
            with self._log.timed("wake_up"):
                self.take_turn(self.groups[-1])
            self.log_memory("wake_up")

    def sleep(self) -> None:
        """With ``--offload-train``: all groups give their accelerator memory back."""
        if self.settings.offload_train:
            for group in self.groups:
                group.sleep()

    def make_room_for_weights(self) -> None:
        """With ``--offload-train``: only the weights that engines get stay on the accelerator.

        Optimizer state, gradients and the critic leave before the engines take memory for their copy of the weights.
        """
        if self.settings.offload_train and self.actor is not None:
            self.take_turn(self.actor)
            self.actor.sleep(keep_weights=True)

    def log_memory(self, phase: str) -> None:
        """``memory/<phase>/…``: GiB in use once a phase is over, where trainer and engines share accelerators."""
        if self.settings.colocated:
            for group in self.groups:
                role = "" if group is self.actor else f"{group.role}_"
                used = {f"memory/{phase}/{role}{name}": gib for name, gib in group.memory().items()}
                self._log.pending.update(used)
