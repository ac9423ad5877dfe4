"""What a policy gradient should do, each as one small experiment on exact numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.config.args import Args
from slime.data.sample import Sample

from .lab import Lab, as_leaves, moments, relative, sine, with_tools
from .world import (
    LENGTHS,
    ONE_LENGTH,
    ONE_TOKEN,
    Draw,
    Draws,
    Step,
    World,
    draws,
)

TOLERANCE = 1e-5
"""Advantages and the engine's log-probs are float32; everything else is float64."""
OPEN: dict[str, Any] = {"eps_clip": 1.0, "eps_clip_high": 1e6, "eps_clip_c": None, "tis_clip": 1e6}
"""Settings without a clip."""
SOME: tuple[Draw, ...] = (
    ((0, 2, 3), (1, 3, 2)),
    ((1, 0, 0), (3, 0, 1)),
    ((2, 1, 3), (3, 3, 0)),
    ((0, 3, 1), (2, 1, 3)),
)
"""Batches with different rewards in each group, in worlds of at least four responses."""


class Finding(NamedTuple):
    """The result of a check: how far it is off, and in words what was found."""

    off: float
    text: str

    @property
    def holds(self) -> bool:
        return self.off <= TOLERANCE  # False for NaN


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%" if not share <= TOLERANCE else "0%"


class Unseen(Exception):
    """Raised if the loss is a function of the user's, which shows no ratio, or no log-probs."""


def _weights(step: Step) -> dict[int, Tensor]:
    if not step.by_sample:
        raise Unseen
    return step.by_sample


class Checks:
    """The checks of one estimator, from causes to consequences: the first that fails says most.

    Each public method is a check; its docstring says what is wanted.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.regularised = self._has_regulariser()
        self.one_length = Lab(args, ONE_LENGTH)
        self.lengths = Lab(args, LENGTHS)

    def _without_rewards(self) -> tuple[Lab, Tensor, Draws]:
        """Return a world in which every reward is 0, an older policy, and its batches."""
        # A critic that is right says 0 everywhere.
        lab = Lab(self.args, replace(ONE_TOKEN, rewards=((0.0,) * 3,) * 2), 2)
        sampler = lab.older(1.0)
        return lab, sampler, draws(lab.world, sampler, lab.size)

    def _has_regulariser(self) -> bool:
        """Return whether steps change the policy without any reward; False if they raise an
        error.
        """
        try:
            lab, sampler, batches = self._without_rewards()
            steps = [lab.step(one, sampler) for one in batches.batches[:4]]
        except Exception:  # the user's class can raise anything, and will do so in the checks
            return False
        return any(float(step.gradient.norm()) > 1e-9 for step in steps)

    def alignment(self) -> Finding:
        """On the policy's own samples every importance ratio is 1."""
        lab = self.lengths.but(skip_zero_advantage_groups=False)
        steps = list(_steps(lab, SOME, 0.0))
        if self.args.loss_type != "policy_loss":
            raise Unseen
        off = max(abs(step.metrics["train/ois"] - 1) for step in steps)
        return Finding(off, f"the mean ratio is {1 + off:.4g}")

    def tokens(self) -> Finding:
        """All tokens of a response have the same weight."""
        off = 0.0
        for step in _steps(self._lab(ONE_LENGTH), SOME, 0.0):
            by_sample = _weights(step)
            largest = max(float(one.abs().max()) for one in by_sample.values())
            for weights in by_sample.values():
                off = max(off, float((weights - weights[0]).abs().max()) / largest)
        return Finding(off, f"they differ by {_percent(off)}")

    def length(self) -> Finding:
        """A token of a response twice as long weighs half as much, or the same."""
        lab = self._lab(LENGTHS)
        # Responses 0 and 2 have one and two tokens; they get one reward and differ from the third.
        batch: Draw = ((0, 2, 1), (0, 2, 1))
        step = lab.step(batch, rewards=lambda prompt, chosen: float(chosen != 1))
        short, long = (float(_weights(step)[i][0]) for i in (0, 1))
        share = long / short if short else math.nan
        laws = {0.5: "1 / its tokens", 1.0: "the same for all tokens"}
        law = min(laws, key=lambda one: abs(share - one))
        off = abs(share - law)
        if off <= TOLERANCE:
            return Finding(off, laws[law])
        return Finding(off, f"with twice the tokens, a token weighs {share:.3g} times as much")

    def own_ratio(self) -> Finding:
        """The ratio of one token does not change the weight of another."""
        lab = self._lab(ONE_LENGTH)
        # Only what follows action 0 was sampled by other probabilities.
        sampler = lab.table.clone()
        for state, row in lab.world.states.items():
            if state[1:] == (0,):
                sampler[row] += lab.world.table(1.9, DRIFT_OF_ONE)[row]
        off = 0.0
        for batch in SOME:
            fresh, late = (_weights(lab.step(batch, one)) for one in (lab.table, sampler))
            for i, weights in fresh.items():
                # The first tokens, and whole responses that begin with action 1.
                end = 1 if lab.world.responses[_chosen(batch, i)][0] == 0 else 2
                off = max(off, relative(late[i][:end] - weights[:end], weights[:end]))
        return Finding(off, f"it changes by {_percent(off)}")

    def clip(self) -> Finding:
        """The clip never takes the gradient of a token that must come back."""
        table = torch.tensor([[0.6, 0.15, 0.25]] * 2, dtype=torch.float64).log()
        older = torch.tensor([[0.24, 0.45, 0.31]] * 2, dtype=torch.float64).log()
        lab = self._lab(ONE_TOKEN, table=table)
        batch: Draw = ((0, 1, 2), (0, 1, 2))

        def weights(good: int) -> list[float]:
            steps = [
                lab.step(batch, one, rewards=lambda _, chosen: float(chosen == good))
                for one in (older, table)
            ]
            # A sample without advantage may be skipped.
            late, fresh = (
                torch.cat([one for i, one in sorted(_weights(step).items()) if i < 2])
                for step in steps
            )
            trained = fresh.abs() > 1e-9
            return (late[trained] / fresh[trained]).abs().tolist()

        # Token 0 has become more likely, token 1 less. If token 1 is good, both must come back.
        back = weights(good=1)
        away = weights(good=0)
        off = 0.0 if min(back) > 0.05 else 1.0
        ratio = f"{min(back):.2g} to {max(back):.2g} back, {min(away):.2g} to {max(away):.2g} away"
        return Finding(off, f"weights at ratios of 2.5 and 0.33: {ratio}")

    def regulariser(self) -> Finding:
        """With equal rewards, what is left of the gradient lowers a KL (or raises the entropy)."""
        if not self.regularised:
            return Finding(0.0, "none")
        lab, sampler, batches = self._without_rewards()
        mean = torch.from_numpy(moments(lab, sampler, batches).mean)
        ref = lab.table + lab.world.table(4.1, 0.5)
        cosines = {
            f"KL to {name}": float(torch.cosine_similarity(mean, -one.flatten(), 0))
            for name, other in {"older weights": sampler, "ref": ref, "uniform": ref * 0}.items()
            for one in _kl_gradients(lab.table, other)
        }
        best = max(cosines, key=lambda name: cosines[name])
        good = cosines[best] > 0.9
        return Finding(
            0.0 if good else 1.0 - cosines[best],
            f"lowers the {best}" if good else f"lowers no KL (best cosine {cosines[best]:.2f})",
        )

    def truncated_samples(self) -> Finding:
        """A sample that was cut off weighs as much as one that ended."""

        def ended(sample: Sample) -> Sample:
            return replace(sample, status=Sample.Status.COMPLETED)

        batches: tuple[Draw, ...] = (((4, 2, 3), (4, 0, 3)), ((4, 4, 2), (1, 4, 4)))
        return _told(_change(self.lengths, batches=batches, make=ended), " if all ended")

    def level_of_other_groups(self) -> Finding:
        """The level of another group's rewards changes nothing."""
        return self._other_group(lambda reward, mean: reward + 1.0)

    def spread_of_other_groups(self) -> Finding:
        """The spread of another group's rewards around their mean changes nothing."""
        return self._other_group(lambda reward, mean: mean + 3.0 * (reward - mean))

    def masked_tokens(self) -> Finding:
        """Output of a tool between the tokens of a response, which is masked, changes nothing."""
        return _told(_change(self.one_length, make=with_tools))

    def leaves(self) -> Finding:
        """A rollout that is given as several samples (an agent's tree) counts as one rollout."""
        return _told(_change(self.lengths, late=0.0, make=as_leaves))

    def micro_batches(self) -> Finding:
        """Neither the size of micro-batches nor packing changes anything."""
        static: list[dict[str, Any]] = [
            {"use_dynamic_batch_size": False, "micro_batch_size": size} for size in (1, 2, 4)
        ]
        packs: list[dict[str, Any]] = [
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 6, "share_prompt_in_pack": one}
            for one in (True, False)
        ]
        return self._worst(static + packs)

    def ranks(self) -> Finding:
        """The number of data-parallel ranks changes nothing."""
        two = {"world_size": 2, "use_dynamic_batch_size": False, "micro_batch_size": 1}
        return self._worst([two])

    def order(self) -> Finding:
        """The order of the samples in a group changes nothing."""
        turned = [tuple((*group[1:], group[0]) for group in batch) for batch in SOME]
        return _told(_change(self.lengths, changed=turned))

    def skipping(self) -> Finding:
        """Samples that a step may skip have no gradient."""
        return self._worst([{"skip_zero_advantage_groups": False}])

    def ratio(self) -> Finding:
        """Samples of an older policy are weighed by the ratio; responses of one token, no clip."""
        own = {name: 1e6 for name in ("dppo_delta",) if name in vars(self.args)}
        lab = self._lab(ONE_TOKEN, 2, changes=OPEN | own)
        true = lab.world.true_gradient(lab.table)
        angles = []
        for staleness in (1.0, 4.0):
            sampler = lab.older(staleness)
            batches = draws(lab.world, sampler, lab.size)
            mean = torch.from_numpy(moments(lab, sampler, batches).mean).view_as(true)
            # Rewards are 0 and 1, so that a baseline changes the weight of a prompt at most.
            angles.append(max(sine(a, b) for a, b in zip(mean, true, strict=True)))
        return Finding(
            max(angles),
            f"off by {_percent(angles[0])} and {_percent(angles[1])} 1 and 4 steps late",
        )

    def direction(self) -> Finding:
        """The mean gradient of responses of one length is that of the expected reward."""
        lab = self._lab(ONE_LENGTH, 2)
        batches = draws(lab.world, lab.table, lab.size)
        mean = torch.from_numpy(moments(lab, lab.table, batches).mean)
        off = sine(mean, lab.world.true_gradient(lab.table).flatten())
        angle = math.degrees(math.asin(min(off, 1.0)))
        return Finding(off, f"E[gradient] is {angle:.1f}° from the true one, groups of 2")

    def _lab(self, world: World, size: int = 3, **how: Any) -> Lab:
        """Return a lab in which only rewards count."""
        return Lab(self.args, world, size, rewarded=self.regularised, **how)

    def _other_group(self, change: Callable[[float, float], float]) -> Finding:
        lab = self.one_length
        first, second = lab.world.rewards
        off = 0.0
        for batch in SOME:
            mean = sum(second[i] for i in batch[1]) / len(batch[1])

            def reward(prompt: int, i: int, mean: float = mean) -> float:
                return change(second[i], mean) if prompt else first[i]

            steps = lab.step(batch), lab.step(batch, rewards=reward)
            before, after = (step.gradient[: len(step.gradient) // 2] for step in steps)
            off = max(off, relative(after - before, before))
        return _told(off, " in a group")

    def _worst(self, settings: Sequence[dict[str, Any]]) -> Finding:
        """Return by how much the worst of some settings changes the gradient."""
        tried = [
            (_change(self.lengths, self.lengths.but(**one)), [f"{k}={v}" for k, v in one.items()])
            for one in settings
        ]
        off, changes = max(tried)
        return _told(off, f" with {', '.join(changes)}")


DRIFT_OF_ONE = 0.1
"""How far one state's logits move in :meth:`Checks.own_ratio`; within the usual clips."""

CHECKS: dict[str, Callable[[Checks], Finding]] = {
    name.replace("_", " "): check for name, check in vars(Checks).items() if name[0] != "_"
}


def run_checks(checks: Checks) -> Iterator[tuple[str, Finding]]:
    """Run all checks. An error of the estimator is a finding of the check in which it occurs."""
    for name, check in CHECKS.items():
        try:
            yield name, check(checks)
        except Unseen:
            yield name, Finding(0.0, "not seen: the loss is a function of yours")
        except Exception as error:  # the user's class can raise anything
            yield name, Finding(math.inf, f"{type(error).__name__}: {error}")


def _chosen(batch: Draw, index: int) -> int:
    return [i for group in batch for i in group][index]


def _kl_gradients(table: Tensor, other: Tensor) -> Iterator[Tensor]:
    """Yield the gradients of KL(π ‖ other) and KL(other ‖ π) with respect to the logits of π."""
    fixed = other.log_softmax(-1)
    for reverse in (True, False):
        leaf = table.clone().requires_grad_()
        own = leaf.log_softmax(-1)
        kl = own.exp() * (own - fixed) if reverse else fixed.exp() * (fixed - own)
        yield torch.autograd.grad(kl.sum(), leaf)[0]


def _steps(lab: Lab, batches: Sequence[Draw], staleness: float) -> Iterator[Step]:
    for one in batches:
        yield lab.step(one, lab.older(staleness))


def _change(
    plain: Lab,
    other: Lab | None = None,
    late: float = 1.0,
    batches: Sequence[Draw] = SOME,
    changed: Sequence[Draw] | None = None,
    **how: Any,
) -> float:
    """Return by how much gradients differ at most if steps run in another lab, on changed batches,
    or on samples made in another way (``how``, as for :meth:`Lab.groups`).
    """
    older = plain.older(late)
    off = 0.0
    for batch, instead in zip(batches, changed or batches, strict=True):
        before = plain.step(batch, older).gradient
        after = (other or plain).step(instead, older, **how).gradient
        off = max(off, relative(after - before, before))
    return off


def _told(off: float, when: str = "") -> Finding:
    return Finding(off, f"the gradient changes by {_percent(off)}{when}")
