"""Compare a small model on any backend and layout with plain transformers (``slime verify``)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.engines.background import run
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, plan_engines, start_engine
from slime.weights.audit import score

from ..local_ranks import run_ranks
from .check import (
    Check,
    Place,
    all_checks,
    check_log_probs,
    write_variants,
)
from .reference import (
    RandomSample,
    Scores,
    VerifyJob,
    make_samples,
    reference_scores,
    settings,
    verify_rank,
)
from .small import (
    UNKNOWN,
    SmallModel,
    VerifyError,
    make_small,
    unknown_family,
)

RANKS = f"{verify_rank.__module__}:{verify_rank.__name__}"
MOST_DATA_RANKS = 4
"""The batch has four groups, and each data-parallel rank needs one."""


@dataclass(frozen=True)
class Target:
    """What to verify.

    Attributes:
        model: A folder or hub id.
        sizes: Sizes of the parallel dimensions by Megatron's names, such as
            ``tensor_model_parallel_size``.
        data: The data-parallel size.
        engine: ``embedded``, ``sglang``, or None for no engine.
        layers: The number of layers of the cut-down model.
        ranks_function: The function of the ranks, ``module:name``.
    """

    model: str
    backend: str = "fsdp"
    sizes: dict[str, int | bool] = field(default_factory=dict)
    data: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    engine: str | None = "embedded"
    layers: int = 4
    trust_remote_code: bool = False
    seconds: float = 600.0
    ranks_function: str = RANKS

    def size(self, name: str) -> int:
        return int(self.sizes.get(f"{name}_parallel_size") or 1)

    @property
    def world_size(self) -> int:
        model = self.size("tensor_model") * self.size("pipeline_model") * self.size("context")
        return model * self.data


@dataclass(frozen=True)
class Verified:
    """The result.

    Attributes:
        checks: In the order in which an error spreads.
        places: The parts of the model whose outputs are wrong; found only if log-probs differ.
        parameters: Those of the first wrong part.
    """

    small: SmallModel
    world_size: int
    checks: list[Check]
    places: list[str] = field(default_factory=list)
    parameters: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return all(check.good for check in self.checks)


def verify(target: Target) -> Verified:
    """Compare a cut-down model on a backend, a layout and an engine with plain transformers on one
    rank.

    Raises:
        VerifyError: The model cannot be cut down, or the layout is impossible.
        RankError: A rank failed.
    """
    _check_layout(target)
    # The smallest model that this layout can divide.
    heads = max(2, target.size("tensor_model"))
    # As many layers on each stage.
    stages = target.size("pipeline_model") * int(
        target.sizes.get("virtual_pipeline_model_parallel_size") or 1
    )
    layers = -(-target.layers // stages) * stages
    samples = make_samples()
    with tempfile.TemporaryDirectory(prefix="slime-verify-") as name:
        folder = Path(name)
        small = make_small(target.model, folder / "model", layers, heads, target.trust_remote_code)
        try:
            expected = reference_scores(
                small.folder, samples, trust_remote_code=target.trust_remote_code
            )
        except UNKNOWN as error:
            raise unknown_family(target.model, small.description, error) from error
        flags = {"trust_remote_code": target.trust_remote_code, **target.flags}
        # The same batch on the backend; and if its outputs are wrong, on models of which only one
        # part has an effect.
        job = VerifyJob(target.backend, dict(target.sizes), flags, small.folder)
        ranks = _train(target, job, folder / "ranks")
        checks = all_checks(expected, [scores[0] for scores in ranks])
        wrong = _wrong_places(target, job, folder, samples) if not checks[1].good else []
        # The engine has the same model, and no part in the training.
        if target.engine is not None:
            scored = engine_log_probs(
                small.folder, target.engine, samples, folder, target.trust_remote_code
            )
            checks.append(
                check_log_probs(
                    expected.log_probs, [scored], f"log-probs of the {target.engine} engine"
                )
            )
    parameters = wrong[0].parameters if wrong else ()
    return Verified(small, target.world_size, checks, [one.name for one in wrong], parameters)


def _check_layout(target: Target) -> None:
    job = VerifyJob(target.backend, dict(target.sizes), target.flags, Path(target.model))
    layout = ParallelLayout.from_args(settings(job, job.model, target.world_size))
    problems = layout.problems()
    if target.data > MOST_DATA_RANKS:
        problems.append(
            f"data-parallel size {target.data}: at most {MOST_DATA_RANKS}, one for each group of "
            "the batch"
        )
    others = [name for name in target.sizes if name != "context_parallel_size"]
    if target.backend == "fsdp" and others:
        problems.append(
            f"FSDP has no {', '.join(others)}: use --backend megatron, or --cp and --dp"
        )
    if problems:
        raise VerifyError("\n".join(problems))


def _train(target: Target, job: VerifyJob, folder: Path) -> list[list[Scores]]:
    ranks = run_ranks(target.ranks_function, target.world_size, job, folder, seconds=target.seconds)
    return [scores for scores in ranks if isinstance(scores, list)]


def _wrong_places(
    target: Target, job: VerifyJob, folder: Path, samples: list[RandomSample]
) -> list[Place]:
    """Return the parts of the model whose variant differs from the reference."""
    places = write_variants(job.model, folder / "variants")
    if not places:
        return []
    ranks = _train(
        target,
        replace(job, variants=tuple(place.variant for place in places)),
        folder / "of_variants",
    )
    wrong = []
    for number, place in enumerate(places, start=1):
        expected = reference_scores(place.variant, samples, False, target.trust_remote_code)
        log_probs = [scores[number].log_probs for scores in ranks]
        if not check_log_probs(expected.log_probs, log_probs, place.name).good:
            wrong.append(place)
    # What is outside of the layers is a part of every variant. If it is wrong, nothing is known
    # about the others.
    return wrong[:1] if wrong and wrong[0] is places[0] else wrong


START_SECONDS = 300.0


def engine_log_probs(
    model: Path,
    engine: str,
    samples: list[RandomSample],
    logs: Path,
    trust_remote_code: bool = False,
    dtype: str = "float32",
) -> dict[int, Tensor]:
    """Start a server with the model, and return its log-probs by position, float32
    ``[response_length]``.

    Args:
        engine: ``embedded`` or ``sglang``.
        logs: The folder for the log of the server.
    """
    values = {
        "hf_checkpoint": str(model),
        "rollout_backend": engine,
        "rollout_dtype": dtype,
        "deterministic": True,
    }
    values |= {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, "threads_per_process": 1}
    values |= {"trust_remote_code": trust_remote_code}
    args = Args().with_values(**values)
    process = start_engine(
        EngineSettings.from_args(args), plan_engines(args)[0], log_path=logs / f"{engine}.log"
    )
    try:
        process.wait_ready(START_SECONDS)
        handle = EngineHandle(process.url)
        by_position = {}
        for position, sample in enumerate(samples):
            scored = run(score(handle, sample["tokens"]))
            by_position[position] = torch.tensor(scored[-len(sample["mask"]) :])
        return by_position
    finally:
        process.stop()


def table(target: Target, result: Verified) -> Iterator[str]:
    """Yield the lines of the table."""
    sizes = {
        name.removesuffix("_parallel_size"): size for name, size in target.sizes.items() if size
    }
    layout = ", ".join(f"{name} {size}" for name, size in [*sizes.items(), ("data", target.data)])
    yield f"model: {result.small.description}"
    yield (
        f"{target.backend} on {result.world_size} rank{'s' if result.world_size > 1 else ''} ({layout}) "
        "in float32"
    )
    yield f"{'check':<34}{'difference':>12}{'allowed':>12}"
    for check in result.checks:
        row = (
            f"{check.what:<34}{check.largest:>12.2g}{check.allowed:>12.2g}  "
            f"{'ok' if check.good else 'DIFFERS'}"
        )
        yield row + "".join(f"; {text}" for text in (check.first, check.note) if text)
    if result.places:
        yield f"wrong outputs: {', '.join(result.places)}"
        inside = sorted({name.removeprefix(f"{result.places[0]}.") for name in result.parameters})
        yield (
            "parameters of the first: "
            f"{', '.join(inside[:12])}{', ...' if len(inside) > 12 else ''}"
        )
    yield "verified" if result.good else "NOT verified"
