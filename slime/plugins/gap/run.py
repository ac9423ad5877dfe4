"""The gap of a recorded step: what both sides scored, and the causes of the difference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from slime.backends.create import create_backend
from slime.config.layout import ParallelLayout
from slime.config.settings import role_args
from slime.data.convert import parts_of_ranks
from slime.data.fields import RankBatch
from slime.engines.process import ServerFailed
from slime.models.loading import load_hf_model
from slime.observability.debug_data import load_rollout
from slime.plugins.gap.reference import GapSample, Reference, Sampling, Setup, load
from slime.plugins.gap.search import Explained, explain
from slime.plugins.tools.local_ranks import Place
from slime.plugins.tools.replay import RecordedRun, ReplayError, capture
from slime.plugins.tools.replay.rank import RoleJob, copy_of_weights, read_batch
from slime.plugins.tools.replay.step import has_gpu, ranks_of, write_parts
from slime.plugins.tools.verify import engine_log_probs
from slime.plugins.tools.verify.check import write_model
from slime.plugins.tools.verify.reference import RandomSample

NOW = "now"
BEFORE = "before"
INITIAL = "initial"
"""Weights: of the step, of the step before it, and of the start of the run."""
LARGEST = 10
MOST_LAYERS = 6
SECONDS = 3600.0


@dataclass(frozen=True)
class LargeToken:
    """A token with a large gap. ``left`` is what of its gap is left without the causes."""

    sample: int
    position: int
    token: int
    engine: float
    trainer: float
    left: float


@dataclass(frozen=True)
class Gap:
    """The result.

    Attributes:
        dtypes: Those of trainer and engine.
        again: The mean absolute difference between the recorded log-probs of the engine and those
            of the embedded engine started again with the trainer's weights; None for another
            engine, or if it does not score as it samples.
        tokens: Those with the largest gaps.
    """

    step: int
    dtypes: tuple[str, str]
    samples: int
    explained: Explained
    again: float | None
    tokens: tuple[LargeToken, ...]


def score_rank(place: Place, job: RoleJob) -> list[GapSample]:
    """Score the samples of a rank as the trainer did, and write the weights on rank 0.

    All ranks call this together. ``job.expected`` is the snapshot before the step before.
    """
    args = role_args(job.args, job.role)
    backend = create_backend(
        args, job.role, place.rank, place.world_size, place.address, place.port, place.rank
    )
    # The older weights first, because loading a state replaces the one before.
    for name, state in ((INITIAL, None), (BEFORE, job.expected), (NOW, job.load)):
        if state is not None:
            backend.load(state / job.role)
        if state is not None or name == INITIAL:
            weights = copy_of_weights(backend, job)
            capture.save_tensors(job.folder, f"{name}.safetensors", weights)
    data_rank = ParallelLayout.from_args(args).data_rank(place.rank)
    batch = read_batch(job, place, job.rollouts[-1], data_rank)
    scored = backend.log_probs(batch)["log_probs"]
    return [_sample(batch, position, trainer) for position, trainer in enumerate(scored)]


def _sample(batch: RankBatch, position: int, trainer: Tensor) -> GapSample:
    facts = capture.facts_of(batch, position)
    engine = facts.per_token.get("rollout_log_probs")
    if engine is None:
        raise ReplayError("the samples of this step have no log-probs of the engine")
    nuclei = routes = None
    if batch.get("rollout_top_p_token_ids") is not None:
        sizes = torch.as_tensor(batch["rollout_top_p_token_offsets"][position]).diff().tolist()
        nuclei = torch.as_tensor(batch["rollout_top_p_token_ids"][position]).split(sizes)
    if batch.get("rollout_routed_experts") is not None:
        routes = torch.as_tensor(batch["rollout_routed_experts"][position])
    return GapSample(
        index=int(facts.numbers["sample_indices"]),
        tokens=facts.tokens.long(),
        engine=engine,
        trainer=trainer.float().cpu(),
        mask=facts.per_token["loss_masks"] > 0,
        stale=facts.per_token.get("staleness", torch.zeros_like(engine)) > 0,
        nuclei=nuclei,
        routes=routes,
    )


def find_gap(run: RecordedRun, step: int) -> Gap:
    """Compare what engine and trainer scored in a step, and find the causes.

    Raises:
        ReplayError: The run lacks a dump or a snapshot, or log-probs of the engine.
        RankError: A training rank failed.
    """
    args = run.args_from(run.start_of(step, through=False))
    layout = ParallelLayout.from_args(args)
    with tempfile.TemporaryDirectory(prefix="slime-gap-") as name:
        folder = Path(name)
        groups = load_rollout(run.template, step, args.load_debug_rollout_data_subsample)
        write_parts(parts_of_ranks(args, groups, step, layout), step, folder)
        older = run.state_before(step - 1) if step - 1 in run.starts() else None
        job = RoleJob(args, "actor", run.state_before(step), (step,), folder, expected=older)
        function = f"{score_rank.__module__}:{score_rank.__name__}"
        ranks = ranks_of(function, job, layout.world_size, folder / "ranks", SECONDS, run.modules)
        # Ranks that share samples return the same; a sample without trained tokens has no gap.
        samples = {one.index: one for rank in ranks for one in rank if one.mask.any()}
        if not samples:
            raise ReplayError(f"step {step} has no trained tokens")
        files = [folder / f"{name}.safetensors" for name in (NOW, BEFORE, INITIAL)]
        now, *others = [
            {name: tensor.float() for name, tensor in load_file(file).items()}
            for file in files
            if file.is_file()
        ]
        what = [
            "the base without its adapter" if args.lora_rank else "the weights of the run's start"
        ]
        if len(others) > 1:
            what.insert(0, f"the weights of step {step - 1}")
        like = load_hf_model(
            str(args.hf_checkpoint),
            torch.float32,
            "cuda" if has_gpu() else "cpu",
            "eager",
            bool(args.trust_remote_code),
        )
        reference = Reference(
            load(like, now, torch.float32),
            Setup(now, Sampling(temperature=float(args.rollout_temperature))),
            [samples[index] for index in sorted(samples)],
        )
        dtypes = str(args.train_dtype), str(args.rollout_dtype or args.train_dtype)
        found = explain(
            reference,
            dict(zip(what, others, strict=False)),
            [getattr(torch, dtype) for dtype in dtypes],
        )
        again = _engine_again(run, reference, dtypes[1], folder)
    largest = tuple(_largest(reference, found.left))
    return Gap(step, dtypes, len(samples), found, again, largest)


def _engine_again(run: RecordedRun, reference: Reference, dtype: str, folder: Path) -> float | None:
    """Score the samples by the embedded engine with the trainer's weights."""
    args = run.args
    like = Path(run.args.hf_checkpoint)
    if args.rollout_backend != "embedded" or args.rollout_quantization or not like.is_dir():
        return None
    if reference.plain.sampling != Sampling() or reference.samples[0].nuclei is not None:
        return None
    if not reference.gap.any():
        return None
    weights = {name: t.to(getattr(torch, dtype)) for name, t in reference.plain.weights.items()}
    write_model(weights, like, folder / "engine")
    samples = [
        RandomSample(tokens=one.tokens.tolist(), mask=one.mask.int().tolist(), reward=0.0, group=0)
        for one in reference.samples
    ]
    trust = bool(args.trust_remote_code)
    try:
        found = engine_log_probs(folder / "engine", "embedded", samples, folder, trust, dtype)
    except ServerFailed as error:
        raise ReplayError(f"the embedded engine could not be started again: {error}") from error
    scored = torch.cat([found[i][one.mask] for i, one in enumerate(reference.samples)])
    return float((reference.engine - scored).abs().mean())


def _largest(reference: Reference, left: Tensor) -> Iterator[LargeToken]:
    places = [(one, at) for one in reference.samples for at in one.mask.nonzero()[:, 0].tolist()]
    for row in reference.gap.abs().argsort(descending=True)[:LARGEST].tolist():
        one, at = places[row]
        token = int(one.tokens[at - len(one.mask)])
        yield LargeToken(
            one.index, at, token, float(one.engine[at]), float(one.trainer[at]), float(left[row])
        )


def page(gap: Gap, texts: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        texts: The texts of the tokens with the largest gaps; empty if they are not known.
    """
    found = gap.explained
    yield (
        f"step {gap.step}: {found.tokens} trained tokens of {gap.samples} samples; the log-probs of "
        f"engine and trainer differ by {found.mean:.3g} on average, {found.largest:.3g} at most"
    )
    yield (
        f"from float32 with the trainer's weights, the trainer ({gap.dtypes[0]}) is "
        f"{found.of_trainer:.3g} away, the engine ({gap.dtypes[1]}) {found.of_engine:.3g}; rounding "
        f"alone makes {found.rounding:.3g}"
    )
    if gap.again is not None:
        yield f"the embedded engine, again with these weights: {gap.again:.3g} from what it recorded"
    yield f"first cause: {found.first}"
    for number, one in enumerate(found.causes, start=1):
        yield f"  {number}. {one.cause}, on the {one.side}: {one.closes:.1%} closed; {one.flag}"
        if one.layers:
            largest = sorted(one.layers.items(), key=lambda part: -part[1])[:MOST_LAYERS]
            shares = (f"{layer} {share:.0%}" for layer, share in largest)
            yield f"     by layer, the largest: {', '.join(shares)}"
    if found.causes:
        yield (
            f"checked by one more pass over all tokens: {found.causes[-1].closes:.1%} predicted, "
            f"{found.closed:.1%} closed"
        )
    why = "rounding: another order of sums" if found.only_rounding else "not explained"
    yield f"left: {float(found.left.abs().mean()):.3g} on average ({why})"
    titles = ("sample", "position", "token", "engine", "trainer", "gap", "left")
    yield "".join(f"{title:>10}" for title in titles) + "  text"
    for row, token in enumerate(gap.tokens):
        numbers = (token.engine, token.trainer, token.engine - token.trainer, token.left)
        cells = "".join(f"{number:>10.4f}" for number in numbers)
        text = repr(texts[row]) if texts else ""
        yield f"{token.sample:>10}{token.position:>10}{token.token:>10}{cells}  {text}"
