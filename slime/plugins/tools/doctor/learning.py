"""Rules for runs that do not learn, or stop to: from the metrics of their steps and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from slime.observability.metrics import figures

from .evidence import worst_tokens
from .facts import FILTERED, Facts, Finding, Row, filtered

REWARD = "rollout/raw_reward"
ENTROPY = "train/entropy_loss"
GAP = "train/train_rollout_logprob_abs_diff"
LATEST = 5
ALL_EQUAL = 0.9
"""Groups have no spread if this share of those in the latest steps has none."""
LARGE_RATE = 1e-3
"""Far above what trains a model with Adam; an adapter stands ten times as much."""


def not_finite(facts: Facts) -> Iterator[Finding]:
    """A loss or gradient norm that is no number."""
    for name in ("train/loss", "train/grad_norm"):
        bad = [row.get("rollout/step") for row in facts.steps if name in row and row[name] is None]
        if bad:
            yield Finding(
                "not_finite",
                f"{name} is not a finite number since step {whole(bad[0])}.",
                (f"{len(bad)} of {len(facts.steps)} steps",),
                "Continue from a snapshot before that step with a smaller --lr or --clip-grad; "
                "the samples of that step are in the folder samples.",
            )
            return


def no_reward(facts: Facts) -> Iterator[Finding]:
    """Rewards that are all the same, so that there is nothing to learn from."""
    rewards = facts.series(REWARD)
    if len(rewards) < 3 or max(rewards) != min(rewards) or not facts.learns_from_rewards:
        return
    # No success at all is another fault than no difference.
    if rewards[0] == 0.0:
        title = "No response has ever got a reward."
        advice = (
            "Read some responses and labels in the folder samples: the reward may expect another "
            "form of answer (slime train --dry-run scores the label's own answer), the responses "
            "may be cut off, or the task is too hard."
        )
    # equal means say less
    elif (_share_without_spread(facts) or 0.0) >= ALL_EQUAL or not facts.samples:
        title = f"Every response gets the same reward, {rewards[0]:g}."
        advice = (
            "Check the reward function with slime check-hooks: it seems not to look at the "
            "response."
        )
    else:
        return
    yield Finding(
        "no_reward", title, (f"{REWARD} of {len(rewards)} steps: {rewards[0]:g}",), advice
    )


def nothing_trained(facts: Facts) -> Iterator[Finding]:
    """A learning rate or gradient of 0 in all steps."""
    # A rate of 0 explains a gradient that changes nothing, so it comes first.
    rates = facts.series("train/lr-pg_0")
    norms = facts.series("train/grad_norm")
    if len(rates) >= 3 and max(rates) == 0.0:
        yield Finding(
            "no_learning_rate",
            "The learning rate is 0 in all steps.",
            (f"train/lr-pg_0 of {len(rates)} steps: 0",),
            "Set --lr, and compare --lr-warmup-iters and --lr-decay-iters with the number of "
            "steps.",
        )
    # see no_spread
    elif (
        len(norms) >= 3 and max(norms) == 0.0 and (_share_without_spread(facts) or 0.0) < ALL_EQUAL
    ):
        yield Finding(
            "no_gradient",
            "The gradient is 0 in all steps: nothing is trained.",
            (f"train/grad_norm of {len(norms)} steps: 0",),
            "If the rewards within each group are equal, no group has an advantage; otherwise "
            "all tokens are masked: slime check-hooks shows the loss mask of your generate "
            "function.",
        )


def large_learning_rate(facts: Facts) -> Iterator[Finding]:
    """A learning rate that breaks the weights in a step: Adam moves each of them by about the
    rate.
    """
    rates = facts.series("train/lr-pg_0")
    rewards = facts.series(REWARD)
    # A high rate alone is no fault, if the reward rises with it.
    large = LARGE_RATE * (10 if facts.settings.get("lora_rank") else 1)
    if len(rewards) < 3 or max(rates, default=0.0) <= large or not facts.learns_from_rewards:
        return
    if median(rewards[-3:]) > rewards[0]:
        return
    yield Finding(
        "large_learning_rate",
        f"The learning rate is {max(rates):g}, at which a step changes the weights by as much as "
        "they are large.",
        (
            f"{REWARD} {rewards[0]:.3f} in the first step, {median(rewards[-3:]):.3f} in the last "
            "ones",
        ),
        "Start again from the model with a --lr of 1e-6 to 1e-5 (an adapter: 1e-5 to 1e-4).",
    )


def no_spread(facts: Facts) -> Iterator[Finding]:
    """Groups whose samples all have the same reward."""
    share = _share_without_spread(facts)
    reward = facts.lately(REWARD)
    if share is None or share < ALL_EQUAL or reward is None:
        return
    solved = reward > 0.95
    yield Finding(
        "solved" if solved else "no_spread",
        "Nearly all groups have only right answers: the task is solved."
        if solved
        else "In nearly all groups, all samples have the same reward, so that they have no "
        "advantages.",
        (
            f"{share:.0%} of the groups of the last {min(len(facts.steps), LATEST)} steps; "
            f"{REWARD} {reward:.3f}",
        ),
        "Use harder prompts, or stop here."
        if solved
        else "Use prompts that the model solves sometimes, more samples per prompt "
        "(--n-samples-per-prompt), or drop such groups (--dynamic-sampling-filter-path).",
        hint=solved,
    )


def _share_without_spread(facts: Facts) -> float | None:
    """The share of the groups of the latest steps whose samples have the same reward; None if it is
    not known.
    """
    prompts = facts.settings.get("rollout_batch_size")
    latest = facts.steps[-LATEST:]
    if not isinstance(prompts, int) or len(latest) < 3 or not facts.learns_from_rewards:
        return None
    counts = [
        sum(value or 0 for name, value in row.items() if "zero_std/count_" in name)
        for row in latest
    ]
    return sum(counts) / len(counts) / prompts


def weights_differ(facts: Facts) -> Iterator[Finding]:
    """Engines that do not compute what the trainer computes."""
    # The audit compares both sides on the same weights. It is sure, and the gap of a step is not.
    audits = facts.series("perf/audit_logprob_diff")
    if audits and max(audits[-3:]) > 1.0:
        yield Finding(
            "weights_differ",
            "The engines do not have the weights of the trainer.",
            (
                f"perf/audit_logprob_diff {max(audits[-3:]):.2f}: log-probs of the same tokens "
                "after the sync",
            ),
            "Run once with --check-weight-update-equal; it names the first tensor that differs. "
            "Custom weight maps and quantized engines are the usual causes.",
        )
        return
    # Tokens of older weights differ because the policy has changed since: see gap_by_age.
    fresh = replace(facts, steps=[{GAP: _gap_of_fresh_tokens(row)} for row in facts.steps])
    change = fresh.change(GAP, least=6)
    latest = fresh.lately(GAP)
    grown = change is not None and change[1] > max(5 * change[0], 0.05)
    if latest is not None and (latest > 0.1 or grown):
        yield Finding(
            "logprob_gap",
            "The engines and the trainer disagree about the log-probs of the generated tokens.",
            (
                f"{GAP} {latest:.3f}" + (f", {change[0]:.3f} at first" if change else ""),
                *worst_tokens(facts, GAP),
            ),
            "Correct the loss for it (--use-tis), use the same precision and attention on both "
            "sides, and with experts replay their routes (--use-rollout-routing-replay).",
        )


def _gap_of_fresh_tokens(row: Row) -> float | None:
    """The log-prob gap of the tokens whose weights are trained; None if a step has no such
    token.
    """
    by_age = any(name.startswith("train/logprob_gap_staleness_") for name in row)
    return row.get("train/logprob_gap_staleness_0") if by_age else row.get(GAP)


def gap_by_age(facts: Facts) -> Iterator[Finding]:
    """Log-probs that differ for tokens of older weights only."""
    names = [f"train/logprob_gap_staleness_{age}" for age in ("0", "1", "2+")]
    gaps = [facts.lately(name) for name in names]
    older = [gap for gap in gaps[1:] if gap is not None]
    if not older or max(older) <= 0.1 or (gaps[0] is not None and max(older) < 3 * gaps[0]):
        return
    yield Finding(
        "gap_of_old_tokens",
        "The tokens of older weights have other log-probs by now than when they were generated.",
        tuple(
            f"{name} {gap:.3f}" for name, gap in zip(names, gaps, strict=True) if gap is not None
        ),
        "This is the age of the samples, not an error of the engines: correct the loss for it "
        "(--use-tis), or lower --max-weight-staleness or --lr.",
        hint=True,
    )


def gap_of_tokens(facts: Facts) -> Iterator[Finding]:
    """A few tokens with wholly different log-probs, while the rest agree."""
    most = facts.lately(f"{GAP}_max")
    mean = facts.lately(GAP)
    if most is not None and mean is not None and most > 10.0 and mean <= 0.1:
        yield Finding(
            "logprob_outliers",
            f"Log-probs of single tokens differ by {most:.1f} between engine and trainer, on "
            f"average by {mean:.3f}.",
            (
                f"{GAP}_max: {listed(facts.series(f'{GAP}_max')[-5:])}",
                *worst_tokens(facts, f"{GAP}_max"),
            ),
            "slime ui shows them in colour (a sample, token by token, with --dump-details). "
            "Usual causes: tokens that a tool or the chat template wrote are not masked, a "
            "forced end token, a sampling mask of one side only.",
            hint=True,
        )


def unstable(facts: Facts) -> Iterator[Finding]:
    """Gradients that jump."""
    # A jump is measured by what is usual in this run.
    norms = facts.series("train/grad_norm")
    usual = sorted(norms)[len(norms) // 2] if norms else 0.0
    if len(norms) >= 8 and max(norms) > max(20 * usual, 10.0):
        at = norms.index(max(norms))
        steps = facts.steps_of("train/grad_norm")
        yield Finding(
            "gradient_spike",
            f"The gradient norm jumped to {max(norms):.3g} at step {steps[at]}; its median is "
            f"{usual:.3g}.",
            (
                f"train/grad_norm from step {steps[max(at - 2, 0)]}: "
                f"{listed(norms[max(at - 2, 0) : at + 3])}",
            ),
            "Lower --lr or --clip-grad, and read the samples of that step: a few extreme rewards "
            "or very long responses are the usual cause.",
        )


class Threshold(NamedTuple):
    """A metric that must not be above ``most``, by the median of its latest values. ``title`` gets
    the value.
    """

    kind: str
    metric: str
    most: float
    title: str
    advice: str


THRESHOLDS = (
    Threshold(
        "clipping",
        "train/pg_clipfrac",
        0.4,
        "{:.0%} of the tokens are clipped: the policy changes too much within a rollout.",
        "Lower --lr, or take fewer steps per rollout (--num-steps-per-rollout).",
    ),
    *(
        Threshold(
            "kl",
            metric,
            1.0,
            f"The policy has run far away: {metric} is {{:.2f}} per token.",
            "Lower --lr, or raise --kl-loss-coef or --kl-coef.",
        )
        for metric in ("train/ppo_kl", "train/kl_loss", "rollout/kl")
    ),
    Threshold(
        "repetition",
        "rollout/repetition_frac",
        0.3,
        "{:.0%} of the responses repeat themselves.",
        "Give repeated text no reward, lower --lr, or continue from an earlier snapshot.",
    ),
    Threshold(
        "stale",
        "rollout/staleness/mean",
        3.0,
        "Samples are {:.1f} weight versions old on average when they are trained.",
        "Lower --async-buffer-size or the number of requests in flight, or use --use-tis.",
    ),
)


def thresholds(facts: Facts) -> Iterator[Finding]:
    """A metric that is above what a run can learn with."""
    for kind, metric, most, title, advice in THRESHOLDS:
        latest = facts.lately(metric)
        if latest is not None and abs(latest) > most:
            yield Finding(
                kind,
                title.format(latest),
                (f"{metric}: {listed(facts.series(metric)[-5:])}",),
                advice,
            )


def entropy(facts: Facts) -> Iterator[Finding]:
    """A policy that became deterministic, or random."""
    change = facts.change(ENTROPY)
    reward = facts.change(REWARD)
    if change is None or reward is None:
        return
    # Both ends are a fault only while the task is not solved.
    first, last = change
    shown = (
        f"{ENTROPY} {first:.3f} at first, {last:.3f} now; {REWARD} {reward[0]:.3f}, "
        f"{reward[1]:.3f}",
    )
    if last < 0.1 * first and last < 0.1 and reward[1] < 0.9:
        yield Finding(
            "entropy_collapse",
            "The policy has become deterministic before the task is solved.",
            shown,
            "Lower --lr, raise --eps-clip-high, add --entropy-coef, or sample at a higher "
            "--rollout-temperature.",
        )
    elif last > 2 * first and last > first + 0.5 and reward[1] <= reward[0] + 0.05:
        yield Finding(
            "entropy_explosion",
            "The responses become random.",
            shown,
            "Lower --lr and --entropy-coef; check that the engines have the trainer's weights "
            "(--audit-weights).",
        )


def reward_falls(facts: Facts) -> Iterator[Finding]:
    """A reward that collapsed, or that rises while the evaluation falls."""
    yield from _hacking(facts)
    rewards = facts.series(REWARD)
    if len(rewards) < 10:
        return
    # The best window against the last one, beyond what noise explains.
    width = max(len(rewards) // 5, 3)
    means = [sum(rewards[i : i + width]) / width for i in range(len(rewards) - width + 1)]
    best = max(means)
    last = means[-1]
    around = facts.steps_of(REWARD)[means.index(best) + width // 2]
    if best > 0 and best - last > max(
        0.3 * abs(best), 0.1, 3 * noise(rewards) * (2 / width) ** 0.5
    ):
        yield Finding(
            "reward_collapse",
            f"The reward has collapsed: {best:.3f} around step {around}, {last:.3f} now.",
            (f"{REWARD}, mean of {width} steps",),
            "Continue from a snapshot before that step (--load, --ckpt-step) with a lower --lr "
            "or a KL term.",
        )


def noise(values: Sequence[float]) -> float:
    """The standard deviation of a single value, from the differences of neighbours, of which half
    are smaller than 0.954 of it if they are normal. The median ignores a few jumps, which are no
    noise.
    """
    return median(abs(after - before) for before, after in pairwise(values)) / 0.954


def _hacking(facts: Facts) -> Iterator[Finding]:
    change = facts.change(REWARD, least=6)
    if change is None or change[1] < change[0] + 0.1:
        return
    # Only a falling evaluation tells a reward that is gamed from one that is learnt.
    evaluations = [
        figures({name: x for name, x in row.items() if x is not None}) for row in facts.evaluations
    ]
    for name in sorted({name for row in evaluations for name in row}):
        values = [
            float(row[name]["reward"]) for row in evaluations if "reward" in row.get(name, {})
        ]
        if len(values) >= 2 and max(values) - values[-1] > 0.05 and values[-1] <= values[0]:
            yield Finding(
                "reward_hacking",
                "The reward rises while the evaluation falls: the model learns what the reward "
                "counts, not the task.",
                (f"{REWARD} {change[0]:.3f} to {change[1]:.3f}", f"eval/{name}: {listed(values)}"),
                "Read samples with the highest rewards, and make the reward stricter; a KL term "
                "slows it down.",
            )
            return


def lengths(facts: Facts) -> Iterator[Finding]:
    """Responses that are cut off, or shrink to nothing."""
    cut = facts.change("rollout/truncated_ratio", least=6)
    reward = facts.change(REWARD, least=6)
    if (
        cut is not None
        and cut[1] > 0.6
        and cut[1] >= cut[0] - 0.1
        and not (reward and reward[1] > reward[0] + 0.1)
    ):
        yield Finding(
            "truncated",
            f"{cut[1]:.0%} of the responses are cut off at --rollout-max-response-len.",
            (f"rollout/truncated_ratio {cut[0]:.2f} at first, {cut[1]:.2f} now",),
            "Allow longer responses, ask for shorter ones in the prompt, or give cut ones less "
            "reward; a model that never ends may lack its end token (--rollout-stop-token-ids).",
        )
    # Shorter is no fault where the reward rises.
    length = facts.change("rollout/response_len/mean")
    if (
        length is not None
        and length[1] < 0.2 * length[0]
        and not (reward and reward[1] > reward[0] + 0.05)
    ):
        yield Finding(
            "length_collapse",
            f"Responses shrank from {length[0]:.0f} to {length[1]:.0f} tokens, and the reward did "
            "not rise.",
            (f"rollout/response_len/mean; {REWARD} {listed(reward or ())}",),
            "Look whether the reward punishes length, and at --advantage-estimator: a mean per "
            "sample favours short ones.",
        )


def dropped(facts: Facts) -> Iterator[Finding]:
    """Samples that are thrown away."""
    prompts = facts.settings.get("rollout_batch_size")
    thrown = [filtered(row) for row in facts.steps[-LATEST:]]
    if isinstance(prompts, int) and len(thrown) >= 3 and median(thrown) >= 2 * prompts:
        yield Finding(
            "filter_starvation",
            f"For each rollout of {prompts} groups, the filter throws {median(thrown):.0f} away.",
            (f"{FILTERED}*, the sum of all reasons: {listed(thrown)}",),
            "Filter the data once beforehand, use prompts of another difficulty, or a weaker "
            "filter.",
        )


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def whole(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"
