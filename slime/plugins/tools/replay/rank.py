"""The work of one training rank in a replay: load the state, train, and say what the weights are
then.
"""

from __future__ import annotations

import json
import pickle
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from slime.backends.base import TrainBackend
from slime.backends.create import create_backend
from slime.backends.shared import SharedBackend
from slime.backends.train_loop import score_rollout, train_on_rollout
from slime.checkpoint.manifest import Manifest
from slime.checkpoint.snapshot import MANIFEST
from slime.cluster.train_actor import Role
from slime.cluster.trainer import OldActor
from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.config.settings import role_args
from slime.data.fields import RankBatch, TrainData, to_rank_batch
from slime.models.digest import tensor_digest
from slime.weights.update import Version, cast_floating

from ..local_ranks import Place
from . import capture
from .capture import Influence, InLoss, SampleFacts


@dataclass(frozen=True)
class RoleJob:
    """What the ranks of the actor or the critic have to do.

    Attributes:
        load: The snapshot of the state before the first step; None for the initial weights.
        rollouts: The rollouts to train, in order. The last one is the replayed step.
        folder: Where the parts of the rollouts are (:func:`part_file`), and what each role computed
            for the other.
        scores_only: Whether the actor only runs its forward passes on the last rollout.
        dtype: The dtype of the digests, as the engines held the weights; None for that of the
            trainer.
        expected: The snapshot after the replayed step, whose weights are compared; None without
            one.
        sample: The index of the sample to look into.
        ranks_samples: Whether the influence of each sample is computed.
        tensors: The folder for intermediate tensors.
        asynchronous: Whether the asynchronous loop ran, on which the weights of ``old_actor``
            depend.
    """

    args: Args
    role: Role
    load: Path | None
    rollouts: tuple[int, ...]
    folder: Path
    scores_only: bool = False
    dtype: str | None = None
    expected: Path | None = None
    sample: int | None = None
    tensors: Path | None = None
    asynchronous: bool = False
    ranks_samples: bool = False


@dataclass
class RoleResult:
    """What one rank found.

    Attributes:
        metrics: Those of the replayed step, equal on all ranks.
        before, after, expected: Digests of the weights by name: before and after the replayed step,
            and in the snapshot after it (empty without one).
        distances: By name, the largest absolute difference between the weights and those of that
            snapshot, and the largest absolute change by the step.
        changing: With an adapter, the tensors that training changes; None without one.
        skipped: Whether the role did not train in this step (``--num-critic-only-steps``).
        influences: Of the samples of this rank, by :func:`.capture.influences_of`.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    distances: dict[str, tuple[float, float]] = field(default_factory=dict)
    sample: SampleFacts | None = None
    changing: frozenset[str] | None = None
    skipped: bool = False
    influences: list[Influence] = field(default_factory=list)


def part_file(folder: Path, rollout_id: int, data_rank: int) -> Path:
    """The file with the part of a data-parallel rank in a rollout."""
    return folder / f"part_{rollout_id}_{data_rank}.pkl"


def entries_file(folder: Path, role: str, rollout_id: int, rank: int) -> Path:
    """The file with what a rank computed for the other role: the critic its values before it was
    trained on a rollout, and with ``--kl-coef`` the actor its log-probs."""
    return folder / f"{role}_entries_{rollout_id}_{rank}.pkl"


def replay_role(place: Place, job: RoleJob) -> RoleResult:
    """Train one role on the rollouts of the job. All ranks of the role call this together."""
    args = role_args(job.args, job.role)
    backend = create_backend(
        args, job.role, place.rank, place.world_size, place.address, place.port, place.rank
    )
    if job.load is not None:
        backend.load(job.load / job.role)
    old = OldActor.from_args(args, job.asynchronous, _manifest(job))
    result = RoleResult()
    data_rank = ParallelLayout.from_args(args).data_rank(place.rank)
    # The copies of the weights are those of the run only if they are refreshed in the same order.
    if job.role == "actor":
        old.updated(backend, str(Version(0, old.to_send(job.rollouts[0])[1])))
    # Steps on the way are trained as usual, and the last one is watched.
    for rollout_id in job.rollouts:
        batch = read_batch(job, place, rollout_id, data_rank)
        replayed = rollout_id == job.rollouts[-1]
        skipped = (
            job.role == "actor" and args.use_critic and rollout_id < args.num_critic_only_steps
        )
        if job.role == "actor" and not skipped:
            old.before_step(backend)
        if replayed and job.scores_only:
            _write_entries(job, place, rollout_id, score_rollout(backend, batch)[0])
            break
        if skipped:
            result.skipped = True
            continue
        if replayed:
            _replay(backend, job, batch, place, result)
        else:
            train_on_rollout(backend, batch)
        if job.role == "critic":
            _write_entries(job, place, rollout_id, {"values": batch["values"]})
            continue
        if args.ref_update_interval and (rollout_id + 1) % args.ref_update_interval == 0:
            backend.copy_weights("actor", "ref")
        if not job.asynchronous or (rollout_id + 1) % args.update_weights_interval == 0:
            old.updated(backend, str(Version(0, rollout_id + 1)))
    return result


def _manifest(job: RoleJob) -> Manifest | None:
    """Return the manifest of the snapshot from which the rank continues; None without one."""
    file = job.load / MANIFEST if job.load is not None and not job.args.finetune else None
    return (
        cast(Manifest, json.loads(file.read_bytes()))
        if file is not None and file.is_file()
        else None
    )


def read_batch(job: RoleJob, place: Place, rollout_id: int, data_rank: int) -> RankBatch:
    batch = to_rank_batch(pickle.loads(part_file(job.folder, rollout_id, data_rank).read_bytes()))
    for role in ("actor", "critic"):
        file = entries_file(job.folder, role, rollout_id, place.rank)
        if file.exists():
            batch.update(pickle.loads(file.read_bytes()))
    return batch


def _write_entries(job: RoleJob, place: Place, rollout_id: int, entries: TrainData) -> None:
    file = entries_file(job.folder, job.role, rollout_id, place.rank)
    file.write_bytes(pickle.dumps(entries))


def _replay(
    backend: TrainBackend,
    job: RoleJob,
    batch: RankBatch,
    place: Place,
    result: RoleResult,
) -> None:
    """Train the replayed step and fill in the result."""
    assert isinstance(backend, SharedBackend)
    actor = job.role == "actor"
    gradients: list[dict[str, Tensor]] = []
    parts: list[InLoss] = []
    shares: list[tuple[int, float]] = []
    position = capture.position_of(batch, job.sample) if job.sample is not None else None
    before: dict[str, Tensor] = {}
    # Everything that is taken from inside of the step. Watching changes no number: what is taken is
    # a copy.
    with ExitStack() as stack:
        if actor:
            before = copy_of_weights(backend, job)
            result.before = _digests(before)
            if backend.adapter_sync is not None:
                result.changing = backend.adapter_sync.changing
            watched = set() if position is None else {position}
            if job.ranks_samples:
                watched = set(range(len(batch["tokens"])))
            stack.enter_context(capture.losses_of(backend, watched, parts))
        if actor and job.ranks_samples:
            heat = backend.needs.temperature
            score = lambda: backend.log_probs(batch, temperature=heat)["log_probs"]  # noqa: E731
            stack.enter_context(capture.influences_of(backend, score, parts, shares))
        if job.tensors is not None:
            stack.enter_context(capture.gradients_of(backend, gradients))
        result.metrics, _ = train_on_rollout(backend, batch)
    # The weights are compared last, because loading the snapshot replaces them.
    after: dict[str, Tensor] = {}
    if actor:
        after = copy_of_weights(backend, job)
        result.after = _digests(after)
        result.influences = capture.influences(batch, shares) if shares else []
        if position is not None:
            result.sample = capture.facts_of(batch, position)
            result.sample.parts = [part for part in parts if part.position == position]
    if job.tensors is not None:
        whole = {f"{job.role}_gradients_{step}.safetensors": g for step, g in enumerate(gradients)}
        whole |= {capture.BEFORE: before, capture.AFTER: after}
        for name, tensors in whole.items() if place.rank == 0 else ():
            capture.save_tensors(job.tensors, name, tensors)
        of_rank = f"{job.role}_batch_{place.rank}.safetensors"
        capture.save_tensors(job.tensors, of_rank, capture.tensors_of_batch(batch))
    if job.expected is not None and actor:
        _compare(backend, job, before, after, result)


def copy_of_weights(backend: TrainBackend, job: RoleJob) -> dict[str, Tensor]:
    """Return the whole weights by name on the CPU, on rank 0 as the engines hold them."""
    # In the dtype and under the names with which the engines got them.
    named = backend.named_weights()
    if backend.rank != 0:
        for _ in named:  # every rank takes part in gathering
            pass
        return {}
    cast = (
        cast_floating(getattr(torch, job.dtype))
        if job.dtype is not None
        else lambda name, t: [(name, t)]
    )
    return {key: t.detach().cpu().clone() for name, whole in named for key, t in cast(name, whole)}


def _digests(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in weights.items()}


def _compare(
    backend: TrainBackend,
    job: RoleJob,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    result: RoleResult,
) -> None:
    """Load the snapshot after the step and compare its weights. This ends the use of the
    backend.
    """
    assert job.expected is not None
    backend.load(job.expected / job.role)
    recorded = copy_of_weights(backend, job)
    result.expected = _digests(recorded)
    for name, tensor in recorded.items():
        now = after[name].double()
        old = before[name].double()
        result.distances[name] = _largest(now - tensor.double()), _largest(tensor.double() - old)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0
