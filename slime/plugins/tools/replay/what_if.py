"""A recorded step with one thing changed, beside the step as it was: loss, gradient, weights, and
the scores of the run's evaluation sets with them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from slime.config.settings import HIDDEN
from slime.data.sample import Sample
from slime.models.shards import copy_side_files
from slime.observability.metrics import read_metrics
from slime.observability.run_dir import RunDir

from . import RecordedRun, ReplayError, attempt_of, attempts_of
from .capture import AFTER, BEFORE, Influence
from .step import Replayed, Wanted, replay_step

METRICS = ("train/loss", "train/pg_loss", "train/grad_norm", "train/ppo_kl", "train/pg_clipfrac")
"""The metrics that are shown whether they change or not."""


@dataclass(frozen=True)
class ChangedSamples:
    """What is changed in the samples of a step.

    Attributes:
        without: Indices of samples that count neither in the loss nor in the statistics of their
            group; the divisor of the mean stays.
        flipped: Indices of samples whose reward is mirrored in the range of the step's rewards: 0
            becomes 1, and 1 becomes 0.
    """

    without: tuple[int, ...] = ()
    flipped: tuple[int, ...] = ()

    def __call__(self, samples: Sequence[Sample]) -> None:
        """Change the samples.

        Raises:
            ReplayError: There is no such sample, or its reward is no number.
        """
        by_index = {sample.index: sample for sample in samples}
        unknown = sorted({*self.without, *self.flipped} - by_index.keys())
        if unknown:
            raise ReplayError(f"the step has no sample with index {', '.join(map(str, unknown))}")
        for index in self.without:
            by_index[index].reward_timed_out = True
        numbers = [s.reward for s in samples if isinstance(s.reward, int | float)]
        for index in self.flipped:
            reward = by_index[index].reward
            if not isinstance(reward, int | float):
                raise ReplayError(f"sample {index} has the reward {reward}, which is no number")
            by_index[index].reward = min(numbers) + max(numbers) - reward


@dataclass(frozen=True)
class Difference:
    """How a set of tensors differs between the two steps.

    Attributes:
        before, after: The norm without and with the change.
        cosine: Between both; NaN if one of them is 0.
        relative: The norm of the difference over ``before``.
    """

    name: str
    before: float
    after: float
    cosine: float
    relative: float


@dataclass(frozen=True)
class WhatIf:
    """The result.

    Attributes:
        plain: The step as it was, computed again.
        metrics: ``(name, before, after)``, with those of an evaluation if one was wanted.
        tensors: The gradient of each optimizer step, its layers, and the change of the weights.
    """

    plain: Replayed
    metrics: tuple[tuple[str, float, float], ...]
    tensors: tuple[Difference, ...]


def what_if(
    run: RecordedRun, changed: RecordedRun, wanted: Wanted, evaluates: bool = False
) -> WhatIf:
    """Compute a step as it was, and with other settings or samples.

    Args:
        changed: The run with the settings of the second step.
        wanted: The step; its ``change`` is for the second one.
        evaluates: Whether the run's evaluation sets are scored with the weights after either step.

    Raises:
        ReplayError, RankError: As for :func:`.step.replay_step` and :func:`.evaluate.evaluated`.
    """
    with tempfile.TemporaryDirectory(prefix="slime-what-if-") as name:
        folders = Path(name) / "plain", Path(name) / "changed"
        plain = replay_step(run, replace(wanted, change=None, tensors=folders[0]))
        other = replay_step(changed, replace(wanted, tensors=folders[1]))
        tensors = tuple(compare_folders(*folders))
        before = dict(plain.values)
        after = dict(other.values)
        names = [name for name in METRICS if name in before and name in after]
        if evaluates:
            scores = [evaluated(run, wanted.step, folder / AFTER) for folder in folders]
            names += sorted(scores[0])
            before |= scores[0]
            after |= scores[1]
    return WhatIf(plain, tuple((name, before[name], after[name]) for name in names), tensors)


def compare_folders(plain: Path, changed: Path) -> Iterator[Difference]:
    """Compare the gradients and the updates in two folders of ``--tensors``."""
    for file in sorted(plain.glob("actor_gradients_*.safetensors")):
        step = int(re.findall(r"\d+", file.name)[-1])
        other = changed / file.name
        after = load_file(other) if other.is_file() else {}
        yield from _by_layer(f"gradient of optimizer step {step}", load_file(file), after)
    updates = []
    for folder in (plain, changed):
        start = load_file(folder / BEFORE)
        end = load_file(folder / AFTER)
        updates.append({name: end[name].float() - start[name].float() for name in end})
    yield compare(updates[0], updates[1], "change of the weights")


def _by_layer(
    what: str, plain: dict[str, Tensor], changed: dict[str, Tensor]
) -> Iterator[Difference]:
    yield compare(plain, changed, what)
    layers: dict[str, list[str]] = {}
    for name in plain:
        match = re.search(r"layers\.(\d+)\.", name)
        layers.setdefault(f"layer {match[1]}" if match else name, []).append(name)
    # Layers by their number, then what is in none.
    for layer in sorted(layers, key=lambda one: (not one.startswith("layer "), len(one), one)):
        yield compare({name: plain[name] for name in layers[layer]}, changed, f"  {layer}")


def compare(plain: dict[str, Tensor], changed: dict[str, Tensor], name: str) -> Difference:
    """Compare the tensors of ``plain``; one that ``changed`` lacks counts as 0."""
    squares = torch.zeros(4, dtype=torch.float64)
    for key, tensor in plain.items():
        a = tensor.double().flatten()
        b = changed[key].double().flatten() if key in changed else torch.zeros_like(a)
        squares += torch.stack([a @ a, b @ b, a @ b, (a - b) @ (a - b)])
    before, after, far = (math.sqrt(float(squares[i])) for i in (0, 1, 3))
    cosine = float(squares[2]) / (before * after) if before * after else math.nan
    return Difference(name, before, after, cosine, far / before if before else math.nan)


@dataclass(frozen=True)
class Ranked:
    """The samples of a step by their influence on the update, the largest first."""

    plain: Replayed
    samples: tuple[Influence, ...]


def ranked(run: RecordedRun, wanted: Wanted) -> Ranked:
    """Order the samples of a step by their influence on the update.

    Raises:
        ReplayError, RankError: As for :func:`.step.replay_step`, or the influences are not known.
    """
    plain = replay_step(run, replace(wanted, ranks_samples=True))
    if not plain.influences:
        raise ReplayError(
            "the influence of samples is not known: the step had no gradient, a custom loss, or "
            "another backend than FSDP"
        )
    return Ranked(plain, tuple(plain.influences))


def _ranking(result: Ranked) -> Iterator[str]:
    yield f"{'sample':>8}{'group':>8}{'reward':>10}{'advantage':>11}{'tokens':>8}{'influence':>11}"
    for one in result.samples:
        yield (
            f"{one.index:>8}{one.group:>8}{one.reward:>10.4g}{one.advantage:>11.4g}"
            f"{one.tokens:>8}{one.share:>11.2%}"
        )
    yield (
        f"together {sum(one.share for one in result.samples):.2%}: 100% for each optimizer step, "
        "but for rounding and what is in no sample's loss, such as an entropy bonus; a sample below "
        "0% worked against the update"
    )


def page(result: WhatIf | Ranked) -> Iterator[str]:
    """Yield the lines of the report."""
    if isinstance(result, Ranked):
        yield from _ranking(result)
        return
    equal = result.plain.exact and result.plain.equal
    yield (
        "the step as it was: equal to the recorded one, bit for bit"
        if equal
        else f"the step as it was: differs from the recorded one by rounding at least "
        f"(tolerance {result.plain.tolerance:g}); smaller effects say nothing"
    )
    yield f"{'':<36}{'before':>13}{'after':>13}{'cosine':>10}{'change':>11}"
    for name, before, after in result.metrics:
        yield f"{name:<36}{before:>13.6g}{after:>13.6g}{'':>10}{after - before:>+11.4g}"
    for one in result.tensors:
        yield (
            f"{one.name:<36}{one.before:>13.6g}{one.after:>13.6g}{one.cosine:>10.5f}"
            f"{one.relative:>11.2%}"
        )


# What only a run that trains, saves or shares its folders with the recorded one has.
_NOT_OF_AN_EVALUATION = (
    "config", "load", "ckpt_step", "finetune", "ref_load", "save", "save_interval", "save_hf",
    "dump_details", "save_debug_rollout_data", "save_debug_train_data", "tracker", "certificate", "num_epoch",
    "replay_schedule", "critic_save", "skip_eval_before_train", "output_dir", "run_name",
)  # fmt: skip


def evaluated(run: RecordedRun, step: int, weights: Path) -> Mapping[str, float]:
    """Evaluate weights with the evaluation sets, the functions and the seed of a run.

    The evaluation is that of ``slime train --inline --num-rollout 0`` with the settings that were
    given to the run, in a process of its own, so the same weights have the same scores.

    Args:
        weights: A file of safetensors with all weights, under the names of the checkpoint.

    Returns:
        The metrics ``eval/…``, without lengths and times.

    Raises:
        ReplayError: The run has no evaluation sets, trains adapters, or the evaluation failed.
    """
    attempt = attempt_of(attempts_of(run.folder), step)
    recorded = attempt.settings
    if not (recorded.get("eval_prompt_data") or recorded.get("eval_config")):
        raise ReplayError("--evaluate needs a run with --eval-prompt-data or --eval-config")
    if run.args.lora_rank:
        raise ReplayError("--evaluate needs whole weights; this run trained adapters")
    # A flag that was not given has its default again.
    explicit = recorded.get("explicit")
    names = {str(name) for name in explicit} if isinstance(explicit, list) else set[str]()
    given = {
        name: value
        for name, value in recorded.items()
        if name in names.difference(_NOT_OF_AN_EVALUATION) and value not in (None, HIDDEN)
    }
    with tempfile.TemporaryDirectory(prefix="slime-evaluate-") as name:
        folder = Path(name)
        _model_folder(Path(str(run.args.hf_checkpoint)), weights, folder / "model")
        given |= {
            "hf_checkpoint": f"{name}/model",
            "output_dir": name,
            "run_name": "evaluation",
            "inline": True,
            "num_rollout": 0,
            "eval_interval": 1,
            "rollout_backend": "embedded",
        }
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *run.modules)))
        _train(given, folder / "flags.yaml", attempt.settled.working_directory, path)
        rows = read_metrics(RunDir(folder / "evaluation").metrics)
    scores = next(row for row in rows if row.get("eval/step") is not None)
    return {
        name: float(value)
        for name, value in scores.items()
        if name.startswith("eval/")
        and "/" not in name[5:]
        and name != "eval/step"
        and value is not None
    }


def _train(flags: Mapping[str, object], file: Path, folder: str, path: str) -> None:
    """Run ``slime train`` in ``folder`` with the flags, and with ``path`` for modules."""
    file.write_text(yaml.safe_dump(flags), encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, "-m", "slime.cli.main", "train", "--custom-config-path", str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        said = finished.stdout + finished.stderr
        raise ReplayError(f"the evaluation failed:\n{said[-2000:]}")


def _model_folder(checkpoint: Path, weights: Path, target: Path) -> None:
    """Make a checkpoint of other weights."""
    target.mkdir()
    copy_side_files(checkpoint, target)
    shutil.copy2(checkpoint / "config.json", target)
    (target / "model.safetensors").symlink_to(weights)
