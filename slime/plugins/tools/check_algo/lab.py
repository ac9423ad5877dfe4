"""The settings, policies and samples with which an estimator is tried; its bias and variance, beside
those of RLOO and REINFORCE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.cli.command import CommandError
from slime.config.algorithm import algorithm_class, check_estimator, loading_problem
from slime.config.args import Args
from slime.config.machine import Machine
from slime.config.parser import read_command_line
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run
from slime.data.sample import Group, Sample

from .world import (
    LENGTHS,
    ONE_LENGTH,
    PROMPT,
    TOOL,
    Draw,
    Draws,
    Step,
    Trainer,
    World,
    draws,
)

DRIFT = 0.04
"""How far a logit moves in one step at most: four steps stay within the usual clips."""
CORRECTIONS = ("use_tis", "get_mismatch_metrics", "use_rollout_logprobs", "keep_old_actor")
"""Flags with which the user says how older samples are corrected."""


class CheckAlgoError(CommandError):
    """Raised if the estimator cannot be loaded, or its flags contradict each other."""


def make_args(name: str, flags: Sequence[str] = ()) -> Args:
    """Return the settings of a run with this estimator on a batch of two prompts.

    Older samples are corrected by the engine's log-probs (``--use-rollout-logprobs``), unless a
    flag says how. Switches that the estimator requires are on.

    Args:
        name: A registered name or the path of a class.
        flags: Words of the command line of train.py.

    Raises:
        CheckAlgoError: Flags are unknown, or do not fit the estimator.
    """
    args, problems = read_command_line([*flags, "--advantage-estimator", name], prog="slime")
    given = args.explicit
    if (problem := loading_problem(name)) is not None:
        raise CheckAlgoError(problem)
    size = args.n_samples_per_prompt if "n_samples_per_prompt" in given else 3
    settings: dict[str, Any] = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": size,
        "global_batch_size": 2 * size,
        **dict.fromkeys(algorithm_class(name).requires, True),
    }
    if not given & set(CORRECTIONS):
        settings["use_rollout_logprobs"] = True
    args = args.with_values(**settings)
    problems += resolve_defaults(Run(args, machine=Machine(gpus=0, cores=1, in_cluster=False)))
    problems += check_estimator(args)
    if problems:
        raise CheckAlgoError("; ".join(problems))
    return args


def relative(difference: Tensor, of: Tensor) -> float:
    """Return the norm of a difference over that of what it should be; 0 if both are 0."""
    size = float(difference.norm())
    return size / max(float(of.norm()), 1e-30) if size > 1e-12 else 0.0


def sine(a: Tensor, b: Tensor) -> float:
    """Return the sine of the angle between two vectors; above 1 if they point apart."""
    along = float((a * b).sum())
    if along <= 0:
        return 2.0
    return relative(a - b * (along / float((b * b).sum())), a)


@dataclass
class Lab:
    """One estimator in one world.

    Attributes:
        size: The number of samples of a group.
        changes: Settings that replace those of ``args``.
        table: The policy that is trained, as logits.
        rewarded: Whether steps leave out what they do without any reward, such as a KL.
    """

    args: Args
    world: World
    size: int = 3
    changes: dict[str, Any] = field(default_factory=dict)
    table: Tensor = field(default_factory=lambda: torch.zeros(0))
    rewarded: bool = False

    def __post_init__(self) -> None:
        if not self.table.numel():
            self.table = self.world.table(0.7, 0.8)
        settings = {
            "rollout_max_response_len": self.world.longest,  # the divisor of Dr. GRPO
            "n_samples_per_prompt": self.size,
            "global_batch_size": self.size * self.world.prompts,
        }
        args = self.args.with_values(**settings | self.changes)
        tables = {
            "actor": self.table,
            "ref": self.table + self.world.table(4.1, 0.5),
            "teacher": self.table + self.world.table(5.2, 0.5),
        }
        self.trainer = Trainer(args, self.world, tables)
        self._known: tuple[Tensor, list[list[list[float]]]] | None = None

    def but(self, **changes: Any) -> Lab:
        """Return the same with other settings."""
        return replace(self, changes=self.changes | changes)

    def older(self, steps: float) -> Tensor:
        """Return the policy of so many steps ago."""
        return self.table - steps * self.world.table(1.9, DRIFT)

    def groups(
        self,
        draw: Draw,
        sampler: Tensor | None = None,
        rewards: Callable[[int, int], float] | None = None,
        make: Callable[[Sample], Sample | list[Sample]] | None = None,
    ) -> list[Group]:
        """Return the samples of a batch.

        Args:
            sampler: The policy that sampled them; the trained one by default.
            rewards: Of ``(prompt, position of the response)``; those of the world by default.
            make: Turns a sample into what the check wants.
        """
        log_probs = self._log_probs(self.table if sampler is None else sampler)
        groups: list[Group] = []
        index = 0
        for prompt, group in enumerate(draw):
            made: Group = []
            for chosen in group:
                response = self.world.responses[chosen]
                reward = self.world.rewards[prompt][chosen]
                one = Sample(
                    group_index=prompt,
                    index=index,
                    tokens=[PROMPT + prompt, *response],
                    response_length=len(response),
                    reward=reward if rewards is None else rewards(prompt, chosen),
                    rollout_log_probs=list(log_probs[prompt][chosen]),
                    status=Sample.Status.TRUNCATED
                    if self.world.is_cut_off(response)
                    else Sample.Status.COMPLETED,
                )
                made.append(one if make is None else make(one))
                index += 1
            groups.append(made)
        return groups

    def _log_probs(self, table: Tensor) -> list[list[list[float]]]:
        """Return the log-probs of each response to each prompt, computed once for a policy."""
        if self._known is None or self._known[0] is not table:
            world = self.world
            scores = [
                [world.log_probs(table, prompt, y).tolist() for y in world.responses]
                for prompt in range(world.prompts)
            ]
            self._known = table, scores
        return self._known[1]

    def step(self, draw: Draw, sampler: Tensor | None = None, **how: Any) -> Step:
        """Train on one batch; the arguments are those of :meth:`groups`."""
        step = self.trainer.step(self.groups(draw, sampler, **how))
        if not self.rewarded:
            return step
        rest = self.trainer.step(self.groups(draw, sampler, **how | {"rewards": lambda *_: 0.0}))
        weights = {i: x - rest.by_sample.get(i, torch.zeros(1)) for i, x in step.by_sample.items()}
        return Step(step.gradient - rest.gradient, weights, step.metrics)


def with_tools(sample: Sample) -> Sample:
    """Return the sample with output of a tool after its first token, which is not trained."""
    prompt, first, *rest = sample.tokens
    first_score, *scores = sample.rollout_log_probs or []
    return replace(
        sample,
        tokens=[prompt, first, TOOL, TOOL, *rest],
        loss_mask=[1, 0, 0, *(1 for _ in rest)],
        response_length=sample.response_length + 2,
        rollout_log_probs=[first_score, 0.0, 0.0, *scores],
    )


def as_leaves(sample: Sample) -> list[Sample]:
    """Return one sample for each token of the response: the leaves of an agent's session."""
    return [
        replace(
            sample,
            index=1000 * t + (sample.index or 0),
            tokens=sample.tokens[: t + 2],
            response_length=1,
            rollout_log_probs=[score],
        )
        for t, score in enumerate(sample.rollout_log_probs or [])
    ]


STALENESS = (0, 1, 4)
GROUP_SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of the gradient over batches.

    Attributes:
        mean: Its expectation, flat.
        variance: The trace of its covariance.
        error: The standard error of the mean; 0 if all batches were computed.
    """

    mean: np.ndarray
    variance: float
    error: float

    @property
    def noise(self) -> float:
        """The variance of a gradient of mean length 1, so that a factor does not count."""
        return self.variance / max(float(self.mean @ self.mean), 1e-30)

    @classmethod
    def of(cls, gradients: np.ndarray, batches: Draws) -> Moments:
        """Average gradients, one row for each batch."""
        mean = batches.weights @ gradients
        variance = float(batches.weights @ np.square(gradients - mean).sum(1))
        error = 0.0 if batches.exact else float(np.sqrt(variance / len(gradients)))
        return cls(mean, variance, error)


def moments(lab: Lab, sampler: torch.Tensor, batches: Draws) -> Moments:
    """Return the moments of the estimator's gradient, as the whole path of slime computes it."""
    rows = [lab.step(batch, sampler).gradient.flatten().numpy() for batch in batches.batches]
    return Moments.of(np.stack(rows), batches)


def reference(lab: Lab, sampler: torch.Tensor, batches: Draws, leave_one_out: bool) -> Moments:
    """Return the moments of RLOO or REINFORCE, from their formula: importance weights per token
    without a clip, and the mean over the tokens of each response, as is the run's default.
    """
    world = lab.world
    # For each response, the gradient of a sample with an advantage of 1.
    leaf = lab.table.clone().requires_grad_()
    vectors = np.zeros((world.prompts, len(world.responses), leaf.numel()))
    for prompt in range(world.prompts):
        for i, response in enumerate(world.responses):
            current = world.log_probs(leaf, prompt, response)
            ratio = (current.detach() - world.log_probs(sampler, prompt, response)).exp()
            vector = torch.autograd.grad((ratio * current).mean(), leaf)[0]
            vectors[prompt, i] = vector.flatten().numpy()
    chosen = np.array(batches.batches)  # [batches, prompts, samples]
    size = chosen.shape[2]
    prompts = np.arange(world.prompts)[None, :, None]
    advantages = np.array(world.rewards)[prompts, chosen]
    if leave_one_out:
        mean = advantages.mean(2, keepdims=True)
        advantages = (advantages - mean) * size / (size - 1)
    terms = advantages[..., None] * vectors[prompts, chosen]
    return Moments.of(terms.sum((1, 2)) / (size * world.prompts), batches)


@dataclass(frozen=True)
class Measured:
    """One row of the table.

    Attributes:
        bias: ‖E[g] / c − ∇J‖ / ‖∇J‖, where the factor c is that of the first row.
        cosine: Between E[g] and ∇J.
        length: ‖E[g]‖ / ‖∇J‖.
        to_rloo, to_reinforce: The noise relative to theirs.
        error: Twice the standard error of ``bias``; 0 if it is exact.
    """

    name: str
    bias: float
    cosine: float
    length: float
    to_rloo: float
    to_reinforce: float
    error: float


def _row(lab: Lab, staleness: float, name: str, factor: float | None = None) -> Measured:
    world = lab.world
    sampler = lab.older(staleness)
    batches = draws(world, sampler, lab.size)
    true = world.true_gradient(lab.table).flatten().numpy()
    estimated = moments(lab, sampler, batches)
    of_true = float(np.linalg.norm(true))
    of_mean = max(float(np.linalg.norm(estimated.mean)), 1e-30)
    factor = factor or float(estimated.mean @ true) / of_true**2
    rloo, reinforce = (reference(lab, sampler, batches, one).noise for one in (True, False))
    return Measured(
        name,
        float(np.linalg.norm(estimated.mean / factor - true)) / of_true,
        float(estimated.mean @ true) / (of_true * of_mean),
        of_mean / of_true,
        estimated.noise / rloo,
        estimated.noise / reinforce,
        2 * estimated.error / abs(factor) / of_true,
    )


def measure(lab: Lab) -> list[Measured]:
    """Return a row for each staleness, one for other lengths, and one for each group size.

    Args:
        lab: The estimator in the world of responses of one length.
    """
    args = lab.args
    rewarded = lab.rewarded
    rows: list[Measured] = []
    for staleness in STALENESS:
        factor = rows[0].length * rows[0].cosine if rows else None
        rows.append(_row(lab, staleness, f"staleness {staleness}", factor))
    rows.append(_row(Lab(args, LENGTHS, 2, rewarded=rewarded), 0, "lengths 1 and 2"))
    # One prompt alone, so that there are few batches.
    alone = replace(ONE_LENGTH, rewards=ONE_LENGTH.rewards[:1])
    for size in GROUP_SIZES:
        rows.append(_row(Lab(args, alone, size, rewarded=rewarded), 0, f"groups of {size}"))
    return rows
