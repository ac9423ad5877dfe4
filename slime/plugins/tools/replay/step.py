"""Replay a step of a run: convert its samples again, train them on new ranks, and compare."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.cluster import environment_texts
from slime.config.layout import ParallelLayout
from slime.data.convert import parts_of_ranks
from slime.data.sample import flatten
from slime.data.staleness import staleness_metrics
from slime.observability.debug_data import load_rollout
from slime.rollout.metrics import rollout_metrics
from slime.weights.update import frozen_by_flags, whole_frozen

from ..local_ranks import run_ranks
from . import RecordedRun, ReplayError
from .compare import (
    TOLERANCE,
    MetricsCompared,
    compare_metrics,
    first_unequal,
    matches,
)
from .rank import RoleJob, RoleResult, part_file, replay_role

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Group, Sample

    from .capture import Influence, InLoss, SampleFacts

RANKS = f"{replay_role.__module__}:{replay_role.__name__}"


@dataclass(frozen=True)
class Wanted:
    """What to replay.

    Attributes:
        through: Whether steps since the last snapshot may be trained again before it.
        sample: The index of a sample to look into.
        tensors: A folder for intermediate tensors.
        tolerance: The allowed difference of metrics; None for 0 in an exact replay, else by dtype.
        ranks_samples: Whether the influence of each sample on the update is computed.
        change: Changes the samples of the step before they are converted; None for none.
        seconds: The deadline for all ranks of a role.
    """

    step: int
    through: bool = False
    sample: int | None = None
    tensors: Path | None = None
    tolerance: float | None = None
    change: Callable[[Sequence[Sample]], None] | None = None
    seconds: float = 3600.0
    ranks_samples: bool = False


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        start: The first rollout that was trained; the step itself if there was a snapshot right
            before it.
        state: Where the state before it came from.
        exact: Whether the numbers must be equal: on the CPU, with the layout and the settings of
            the run.
        tolerance: What the metrics were compared with.
        before: Whether the weights before the step are those that the engines had; None if it is
            not known.
        after: The same after the step.
        version: The recorded version of the weights after the step; None if the engines did not get
            them.
        tensors: The number of weight tensors that were compared with the snapshot after the step; 0
            without one.
        differs: The first of them that differs.
        distance: Its largest difference, and the largest change of that tensor by the step.
        worst: The largest difference of all tensors, relative to the change of the same tensor by
            the step.
        skipped: Whether the actor did not train in this step.
        values: All metrics of the step as it was computed now.
        influences: Of the samples on the update, the largest first.
    """

    step: int
    start: int
    state: str
    samples: int
    groups: int
    device: str
    layout: ParallelLayout
    exact: bool
    tolerance: float
    metrics: MetricsCompared
    before: bool | None
    after: bool | None
    version: str | None
    tensors: int
    differs: str | None
    distance: tuple[float, float] | None
    worst: float
    sample: SampleFacts | None
    skipped: bool
    values: Mapping[str, float] = field(default_factory=dict)
    influences: Sequence[Influence] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        weights = not self.exact or (
            self.before is not False and self.after is not False and self.differs is None
        )
        return weights and not self.metrics.differences

    @property
    def first(self) -> str:
        """The name of the first number that differs; empty if nothing does."""
        if self.exact and self.before is False:
            return "the weights before the step"
        if self.metrics.differences:
            return self.metrics.differences[0].name
        if self.exact and (self.differs is not None or self.after is False):
            return self.differs or "the weights after the step"
        return ""


def replay_step(run: RecordedRun, wanted: Wanted) -> Replayed:
    """Compute a step of a run again.

    Raises:
        ReplayError: The run lacks a dump or a snapshot, or has no such sample or step.
        RankError: A training rank failed.
    """
    start = run.start_of(wanted.step, wanted.through)
    if wanted.step not in run.steps:
        raise ReplayError(
            f"{run.folder / 'metrics.jsonl'} has no row of step {wanted.step}: the step did not "
            "complete"
        )
    args = run.args_from(start)
    on_gpu = has_gpu()
    # Kernels that are not deterministic would differ from themselves.
    if on_gpu:
        args = args.with_values(deterministic=True)
    layout = ParallelLayout.from_args(args)
    if args.critic_gpus not in (0, layout.world_size):
        raise ReplayError(
            f"the critic has {args.critic_gpus} ranks and the actor {layout.world_size}; only "
            "steps of runs in which both have the same number are replayed"
        )
    rollouts = tuple(range(start, wanted.step + 1))
    with tempfile.TemporaryDirectory(prefix="slime-replay-") as name:
        folder = Path(name)
        # The samples are converted again and divided over the ranks, as the rollout manager did.
        for rollout_id in rollouts:
            groups = load_rollout(run.template, rollout_id, args.load_debug_rollout_data_subsample)
            samples = flatten(groups)
            if wanted.change is not None and rollout_id == wanted.step:
                wanted.change(samples)
            # A function of the user's replaces the metrics of the samples.
            metrics = (
                {}
                if args.custom_rollout_log_function_path
                else rollout_metrics(args, args.reward_key, samples)
            )
            metrics |= staleness_metrics(samples, rollout_id)
            write_parts(parts_of_ranks(args, groups, rollout_id, layout), rollout_id, folder)
        _check_sample(wanted, samples)
        if args.train_during_rollout > 1 and args.calculate_per_token_loss:
            _refuse_samples(wanted)
        job = _job(run, args, wanted, rollouts, folder)
        ranks = _train(job, folder, layout.world_size, wanted.seconds, metrics, run.modules)
    return _compared(run, wanted, start, ranks, metrics, groups)


def write_parts(parts: Iterable[object], rollout_id: int, folder: Path) -> None:
    """Write the converted samples of the data-parallel ranks, for :func:`.rank.read_batch`."""
    for rank, part in enumerate(parts):
        part_file(folder, rollout_id, rank).write_bytes(pickle.dumps(part))


def _job(
    run: RecordedRun, args: Args, wanted: Wanted, rollouts: tuple[int, ...], folder: Path
) -> RoleJob:
    sent = run.weights.get(wanted.step + 1) or run.weights.get(wanted.step)
    after = run.snapshots.get(wanted.step)
    return RoleJob(
        args=args,
        role="actor",
        load=run.state_before(rollouts[0]),
        rollouts=rollouts,
        folder=folder,
        dtype=sent.dtype if sent is not None else None,
        expected=after.path if after is not None else None,
        sample=wanted.sample,
        tensors=wanted.tensors,
        asynchronous=run.settled.asynchronous,
        ranks_samples=wanted.ranks_samples,
    )


def _train(
    job: RoleJob,
    folder: Path,
    world_size: int,
    seconds: float,
    metrics: dict[str, float],
    modules: Sequence[str],
) -> list[RoleResult]:
    """Train the critic, if there is one, then the actor; returns the actor's results by rank."""
    results: list[RoleResult] = []
    for number, one in enumerate(_jobs(job)):
        place = folder / f"{number}_{one.role}"
        results = ranks_of(RANKS, one, world_size, place, seconds, modules)
        metrics.update(results[0].metrics)
    return results


def ranks_of(
    function: str,
    job: RoleJob,
    world_size: int,
    folder: Path,
    seconds: float,
    modules: Sequence[str],
) -> list[Any]:
    """Run the ranks of a job, in the environment of the run, and return their results."""
    variables = environment_texts(job.args.train_env_vars)
    # cuBLAS is deterministic only with a workspace of its own.
    variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = int(job.args.threads_per_process or 1)
    return run_ranks(
        function,
        world_size,
        job,
        folder,
        threads=threads,
        variables=variables,
        seconds=seconds,
        modules=modules,
    )


def _jobs(job: RoleJob) -> Iterator[RoleJob]:
    """Yield what the processes of each role do, one after the other; the last is the job of the
    actor.
    """
    if job.args.use_critic:
        # With a KL penalty, each step of the critic needs the actor's log-probs, which need the
        # steps before it, and these the values of the critic. So both roles begin again for each of
        # the rollouts.
        both = job.args.kl_coef != 0
        for count in range(1 if both else len(job.rollouts), len(job.rollouts) + 1):
            begun = replace(job, rollouts=job.rollouts[:count])
            if both:
                yield replace(begun, scores_only=True)
            yield replace(begun, role="critic")
    yield job


def _check_sample(wanted: Wanted, samples: Sequence[Sample]) -> None:
    known = sorted(sample.index for sample in samples if sample.index is not None)
    if wanted.sample is not None and wanted.sample not in known:
        shown = f"{', '.join(map(str, known[:40]))}{', ...' if len(known) > 40 else ''}"
        raise ReplayError(
            f"step {wanted.step} has no sample with index {wanted.sample}; its samples: {shown}"
        )


def _refuse_samples(wanted: Wanted) -> None:
    if wanted.sample is not None or wanted.ranks_samples:
        raise ReplayError(
            "with --train-during-rollout and --calculate-per-token-loss, the loss is divided by "
            "the number of tokens after all samples: what one adds is not known; replay the step "
            "as a whole"
        )


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _compared(
    run: RecordedRun,
    wanted: Wanted,
    start: int,
    ranks: Sequence[RoleResult],
    metrics: Mapping[str, float],
    groups: Sequence[Group],
) -> Replayed:
    args = run.args
    first = ranks[0]
    on_gpu = has_gpu()
    # The order in which groups finished is not recorded, and so not that of their gradients.
    ordered = args.deterministic or args.train_during_rollout == 1
    on_cpu = not on_gpu and not run.settled.on_gpu
    exact = ordered and not run.changes and (on_cpu or wanted.tolerance == 0)
    tolerance = wanted.tolerance
    if tolerance is None:
        tolerance = 0.0 if exact else TOLERANCE[args.train_dtype]
    # Which tensors an update may have left out, because training does not change them.
    changing = first.changing
    frozen = frozen_by_flags(args.only_train_params_name_list, args.freeze_params_name_list)
    if changing is not None:
        frozen = lambda name: name not in changing  # noqa: E731
    frozen = whole_frozen(frozen) if frozen is not None else None
    # What the engines got before and after the step, and the snapshot after it.
    earlier = run.weights.get(wanted.step)
    later = run.weights.get(wanted.step + 1)
    differs = first_unequal(first.expected, first.after)
    state = run.state_before(start)
    return Replayed(
        step=wanted.step,
        start=start,
        state=str(state or args.hf_checkpoint),
        samples=len(flatten(groups)),
        groups=len(groups),
        device="GPU, deterministic kernels" if on_gpu else "CPU",
        layout=ParallelLayout.from_args(args),
        exact=exact,
        tolerance=tolerance,
        metrics=compare_metrics(run.steps[wanted.step], metrics, tolerance),
        before=matches(earlier, first.before, frozen) if earlier is not None else None,
        after=matches(later, first.after, frozen) if later is not None else None,
        version=later.version if later is not None else None,
        tensors=len(first.expected),
        differs=differs,
        distance=first.distances[differs] if differs is not None else None,
        worst=max(
            (far / step if step else far for far, step in first.distances.values()), default=0.0
        ),
        sample=_merged([one.sample for one in ranks if one.sample is not None]),
        skipped=first.skipped,
        values=dict(metrics),
        influences=sorted(
            (sample for one in ranks for sample in one.influences),
            key=lambda sample: -abs(sample.share),
        ),
    )


def _merged(found: Sequence[SampleFacts]) -> SampleFacts | None:
    """Return a sample with what it adds to the loss on all ranks that share its tokens."""
    if not found:
        return None
    # Tensor-parallel ranks compute the same; context-parallel ones have other tokens of the sample.
    parts: dict[tuple[int, tuple[int, ...]], InLoss] = {}
    for part in (part for one in found for part in one.parts):
        parts.setdefault((part.step, tuple(part.index.tolist())), part)
    return replace(found[0], parts=list(parts.values()))
