"""The training side as the driver sees it: actor and critic, which of them is on the accelerator,
and which weights the copy ``old_actor`` holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slime.backends.token_budget import Measurement, budget, explanation
from slime.cluster.rollout_manager import RolloutManager
from slime.cluster.train_actor import TrainActor
from slime.config.hf_config import lookup_dimension, model_config
from slime.config.layout import context_ranks
from slime.config.rollout import (
    is_fully_async,
    longest_sample,
    old_actor_lag,
    served_context,
)
from slime.weights.update import parse_version

if TYPE_CHECKING:
    from slime.backends.base import ModelTag
    from slime.checkpoint.manifest import Manifest, OldActorFacts
    from slime.cluster.actors import Ref
    from slime.cluster.phases import StepLog
    from slime.cluster.placement import Placement
    from slime.cluster.ray_wait import ManagerClient
    from slime.cluster.start import Parts
    from slime.cluster.stop_signals import StopSignals
    from slime.cluster.train_actor import Batches, Entries, TrainResult
    from slime.cluster.train_group import TrainGroup
    from slime.config.algorithm import KlConfig
    from slime.config.args import Args
    from slime.config.cluster import ClusterConfig


class HoldsCopies(Protocol):
    """The training ranks of an actor, as :class:`OldActor` sees them."""

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None: ...


@dataclass
class OldActor:
    """Keeps the copy ``old_actor`` equal to the weights that generated the rollout that is trained
    next.

    If each rollout starts after the previous update, these are the weights that the engines hold.
    In the asynchronous loop, the first rollout that is trained after an update was generated before
    that update, with the weights from before it. The rollouts after it, until the next update, were
    generated with the engines' weights.

    A snapshot between two updates holds rollouts that were generated ahead with the engines'
    weights, and more of them would follow until the next update. So a run that resumes from it
    sends these weights again, from the copy of them in the snapshot, and not those of its last
    step.

    Attributes:
        is_kept: ``--keep-old-actor``.
        lag: The number of updates by which the first rollout after an update is behind, 0 or 1; see
            :func:`old_actor_lag`.
        interval: The number of steps between two updates.
        before: What the snapshot says from which the run resumes; None without one.
        first_step: The number of steps that had trained the weights of that snapshot.
        held: The number of steps that had trained the engines' weights at the last update; None
            before the first.
        version: That of the last update of this process.
        steps_behind: Steps since the last update whose rollouts had the weights from before it;
            None once the copy holds the engines' weights.
    """

    is_kept: bool
    lag: int = 0
    interval: int = 1
    before: OldActorFacts | None = None
    first_step: int = 0
    held: int | None = None
    version: str = ""
    steps_behind: int | None = None

    def __post_init__(self) -> None:
        # With another lag, the snapshot has other copies.
        if self.before is not None and self.is_kept and self.before["lag"] == self.lag:
            self.held = self.before["held"]
        else:
            self.before = None

    @classmethod
    def from_args(
        cls, args: Args, asynchronous: bool, snapshot: Manifest | None = None
    ) -> OldActor:
        is_kept = args.keep_old_actor
        interval = args.update_weights_interval if asynchronous else 1
        lag = 0
        if is_kept and asynchronous:
            lag = old_actor_lag(args, interval, is_fully_async(args)) or 0
        if snapshot is None:
            return cls(is_kept, lag, interval)
        return cls(
            is_kept, lag, interval, snapshot.get("old_actor"), first_step=snapshot["rollout_id"] + 1
        )

    def facts(self, ahead: int) -> OldActorFacts | None:
        """Return what a snapshot with ``ahead`` rollouts generated ahead says; None if there is
        nothing to say.
        """
        return None if self.held is None else {"held": self.held, "lag": self.lag, "ahead": ahead}

    @property
    def engines_copy(self) -> ModelTag | None:
        """The copy of the weights that the engines have; None without one."""
        if self.held is None:
            return None
        return "rollout_actor" if self.lag == 1 else "old_actor"

    def to_send(self, step: int) -> tuple[ModelTag, int]:
        """Return the weights for an update after ``step`` steps, and the number of steps that
        trained them.
        """
        copy = self.engines_copy
        held = self.held or 0
        resumed_between = step == self.first_step and step % self.interval != 0
        if copy is not None and held < step and resumed_between:
            return copy, held
        return "actor", step

    def updated(self, actor: HoldsCopies, version: str) -> None:
        """Note that the engines got the weights of ``actor`` as ``version``; a repeated call does
        nothing.

        Calls are repeated when a weight update is repeated because engines were lost.
        """
        if not self.is_kept or version == self.version:
            return
        before = self.before
        # What the engines held until now is in the copy ``rollout_actor``, but at the first update.
        newest_held: ModelTag = "rollout_actor" if self.version or before is not None else "actor"
        self.before = None
        self.version = version
        self.held = parse_version(version).step
        # After a resume, no rollout is behind if those of the snapshot were generated with the
        # weights that the engines get now, or if there are none, because what was in progress at a
        # stop is generated again.
        none_behind = before is not None and (before["ahead"] == 0 or self.held < self.first_step)
        self.steps_behind = None
        if self.lag:
            self.steps_behind = 1 if none_behind else 0
        # With the same weights as in the snapshot, its copies are the right ones.
        if before is None or before["held"] != self.held:
            actor.copy_weights(newest_held if self.lag == 1 else "actor", "old_actor")
            if self.lag == 1:
                actor.copy_weights("actor", "rollout_actor")

    def before_step(self, actor: HoldsCopies) -> None:
        """Prepare the copy for the rollout that is about to be trained."""
        # The first rollout after an update still has the weights from before it. With the second
        # one, the copy moves on to ``rollout_actor``, in which the ranks keep what the engines
        # hold.
        if self.steps_behind == 0:
            self.steps_behind = 1
        elif self.steps_behind == 1:
            actor.copy_weights("rollout_actor", "old_actor")
            self.steps_behind = None


@dataclass
class Trainer:
    """The training side of one run; used only by the driver's main thread.

    Attributes:
        actor: None in a run that does not train (``--debug-rollout-only``).
        critic: None in a run without a critic.
        trained: The last rollout whose training is complete, also before a resume; None before the
            first.
        parts: The training of each part of the rollout in progress (``--train-during-rollout``).
        offloads: Whether training ranks move to CPU memory between their phases
            (``--offload-train``).
        colocated: Whether they or the engines do so, because both share accelerators.
    """

    actor: TrainGroup | None
    critic: TrainGroup | None
    old_actor: OldActor
    log: StepLog
    stop: StopSignals
    cluster: ClusterConfig
    kl: KlConfig
    num_critic_only_steps: int
    trained: int | None = None
    parts: list[list[Ref[TrainResult]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offloads = self.cluster.offload_train
        self.colocated = self.offloads or self.cluster.offload_rollout
        self.groups = [group for group in (self.actor, self.critic) if group is not None]
        self.side_by_side = self.critic is not None and bool(self.cluster.critic_num_nodes)
        # Those that share accelerators with others: not a critic with its own.
        self.taking_turns = self.groups[:1] if self.side_by_side else self.groups

    def train_early_part(self, refs: Batches) -> None:
        """Start to train on the next part of a rollout that is still generated."""
        assert self.actor is not None, "nothing trains with --debug-rollout-only"
        self.parts.append(
            self.actor.start_on_parts(TrainActor.train_early_part, refs, len(self.parts))
        )

    def train(self, rollout_id: int, refs: Batches, critic_refs: Batches = ()) -> None:
        """Train on a rollout: first the critic, because the actor's advantages need its values,
        then the actor.

        If the critic's returns have a KL penalty, the actor's forward passes come before both. A
        critic with GPUs of its own computes its values while the actor runs its forward passes, and
        trains while the actor does; ``critic_refs`` are its batches if its ranks divide a rollout
        otherwise. The metrics are added to those of the step. In the first
        ``--num-critic-only-steps`` rollouts, the actor does not train. A stop signal waits until
        the rollout is trained completely.
        """
        # A snapshot may only be written between rollouts. If a signal ended one of the waits below,
        # the snapshot before the stop would hold weights of this rollout but count it as untrained,
        # and a resumed run would repeat it.
        actor = self.actor
        assert actor is not None, "nothing trains with --debug-rollout-only"
        with self.stop.deferred():
            for part in self.parts:  # an error of one must end the run before the rest is trained
                actor.finish(part, rollout_id)
            self.parts = []
            if self.side_by_side:
                self._train_side_by_side(actor, rollout_id, refs, critic_refs or refs)
            else:
                self._train(actor, rollout_id, refs)
            interval = self.kl.ref_update_interval
            if interval and (rollout_id + 1) % interval == 0:
                self.take_turn(actor)
                actor.copy_weights("actor", "ref")
        self.trained = rollout_id

    def _train(self, actor: TrainGroup, rollout_id: int, refs: Batches) -> None:
        critic = self.critic
        trains_actor = critic is None or rollout_id >= self.num_critic_only_steps
        scores = None
        values = None
        if critic is not None:
            if self.kl.kl_coef:
                self.take_turn(actor)
                if trains_actor:
                    self.old_actor.before_step(actor)
                result, scores = actor.run("score", rollout_id, refs)
                self._log_result(result)
            self.take_turn(critic)
            result, values = critic.run("train", rollout_id, refs, scores)
            self.log.pending.update(result["metrics"])
        if trains_actor:
            self.take_turn(actor)
            if scores is None:
                self.old_actor.before_step(actor)
            known = _joined(scores, values) if scores and values else values
            result, _ = actor.run("train", rollout_id, refs, known)
            self._log_result(result)

    def _train_side_by_side(
        self, actor: TrainGroup, rollout_id: int, refs: Batches, critic_refs: Batches
    ) -> None:
        critic = self.critic
        assert critic is not None, "otherwise nobody is beside the actor"
        trains_actor = rollout_id >= self.num_critic_only_steps
        self.take_turn(actor)
        if trains_actor:
            self.old_actor.before_step(actor)
        # Forward passes of both; then each gets what the other has computed.
        scoring = critic.begin("score", rollout_id, critic_refs)
        log_probs: list[Entries] = []
        if trains_actor or self.kl.kl_coef:
            result, log_probs = actor.run("score", rollout_id, refs)
            self._log_result(result)
        _, values = critic.finish(scoring, rollout_id)
        of_actor = critic.entries_from(actor, log_probs) or [[] for _ in values]
        training = critic.begin("train", rollout_id, critic_refs, _joined(values, of_actor))
        if trains_actor:
            known = _joined(log_probs, actor.entries_from(critic, values))
            self._log_result(actor.run("train", rollout_id, refs, known)[0])
        self.log.pending.update(critic.finish(training, rollout_id)[0]["metrics"])

    def _log_result(self, result: TrainResult) -> None:
        self.log.pending |= result["metrics"]
        for name, seconds in result["timings"].items():
            self.log.pending[f"perf/{name}_time"] = seconds

    # --- colocated: which group is on the accelerator ----------------------------------------

    def take_turn(self, group: TrainGroup) -> None:
        """With ``--offload-train``, put the other group to sleep and then wake ``group``.

        In this order, the accelerator never has to hold actor and critic at the same time.
        """
        if self.offloads and group in self.taking_turns:
            for other in self.taking_turns:
                if other is not group:
                    other.sleep()
            group.wake()

    def wake(self) -> None:
        """With ``--offload-train``, wake the group that works first: the critic if there is one
        that does not wait for the actor's log-probs."""
        if self.offloads and self.groups:
            with self.log.display.timers("wake_up"):
                # The actor is the first of them, and a critic the last.
                groups = self.taking_turns
                self.take_turn(groups[0] if self.kl.kl_coef else groups[-1])
            self.log_memory("wake_up")

    def sleep(self) -> None:
        """With ``--offload-train``, release the accelerator memory that others share."""
        if self.offloads:
            for group in self.taking_turns:
                group.sleep()

    def make_room_for_weights(self) -> None:
        """With ``--offload-train``, keep only the weights that are sent to engines on the
        accelerator.

        Optimizer state, gradients and the critic must leave before the engines take memory for
        their copy of the weights.
        """
        if self.offloads and self.actor is not None:
            self.take_turn(self.actor)
            self.actor.sleep(keep_weights=True)

    def log_memory(self, phase: str) -> None:
        """Log ``memory/<phase>/…``, the GiB in use after a phase, if trainer and engines share
        accelerators.
        """
        if self.colocated:
            for group in self.groups:
                role = "" if group is self.actor else f"{group.role}_"
                for name, gib in group.memory().items():
                    self.log.pending[f"memory/{phase}/{role}{name}"] = gib


def _joined(entries: list[Entries], more: list[Entries]) -> list[Entries]:
    """For each rank, the entries of both."""
    return [[*a, *b] for a, b in zip(entries, more, strict=True)]


SHARE = 0.85
"""Fraction of the trainer's available memory that the largest micro-batch may fill; the rest is for
fragmentation.
"""
SHARE_WITH_EXPERTS = 0.7
"""The same with experts: tokens choose their experts, so some ranks get more tokens than in the
measurement.
"""


def settle_token_budget(
    parts: Parts, placement: Placement, trainer: Trainer, manager: ManagerClient
) -> None:
    """Find the token budget and pass it to all processes that pack samples into micro-batches.

    Does nothing if the flag is given, or without a GPU. A run that resumes from a snapshot with the
    same number of GPUs packs as it did before.
    """
    args = parts.args
    manifest = parts.begin.manifest
    # Two deterministic runs must pack alike, even if one finds less free memory. In float32 there is
    # no varlen kernel on GPUs, so memory grows with the square of a sample's length, which the
    # measurement does not cover.
    unmeasured = args.deterministic or args.train_dtype == "float32"
    given = not args.use_dynamic_batch_size or "max_tokens_per_gpu" in args.explicit
    if given or unmeasured or trainer.actor is None or not placement.on_gpu:
        return
    tokens = None
    if manifest is not None and manifest.get("world_size") == len(trainer.actor.ranks):
        tokens = manifest.get("settings", {}).get("max_tokens_per_gpu")
    if isinstance(tokens, int) and tokens:
        trainer.log.note(f"--max-tokens-per-gpu {tokens}: as in the snapshot")
    else:
        share = memory_share(str(args.hf_checkpoint))
        longest = longest_sample(args, served_context(args), context_ranks(args.megatron))
        measurements: list[Measurement] = []
        for group in reversed(trainer.groups):  # the actor last, so that it is awake afterwards
            trainer.take_turn(group)
            measurements += group.measure_memory(share)
        tokens = budget(measurements, longest)
        trainer.log.note(explanation(tokens, longest, measurements))
    forward_only = tokens
    if "log_probs_max_tokens_per_gpu" in args.explicit:
        forward_only = args.log_probs_max_tokens_per_gpu or tokens
    budgets = {"max_tokens_per_gpu": tokens, "log_probs_max_tokens_per_gpu": forward_only}
    for group in trainer.groups:
        group.set_token_budgets(budgets)
    manager.call(
        "the rollout manager to take the token budget", RolloutManager.set_token_budgets, budgets
    )
    parts.args = args.with_values(**budgets)


def memory_share(checkpoint: str) -> float:
    _, experts = lookup_dimension(model_config(checkpoint), "num_experts")
    return SHARE_WITH_EXPERTS if experts else SHARE
