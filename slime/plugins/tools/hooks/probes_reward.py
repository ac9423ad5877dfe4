"""Probes of hooks for rewards: of single samples, of groups, by a reward model, and post-processing of rewards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from slime.data.sample import Sample, flatten
from slime.plugins.tools.hooks.bench import Bench
from slime.plugins.tools.hooks.guard import Hook, check_signature, guarded, wrong
from slime.rollout.base_types import call, parameters, supported_kwargs
from slime.rollout.verifier.pool import STARTUP_SECONDS


def reward(bench: Bench, fn: Hook) -> str:
    """Test ``await fn(args, sample)``, or with ``--group-rm`` ``await fn(args, samples)``, or a class."""
    samples = flatten(bench.answered(rewards=False))
    for sample in samples:
        sample.reward = None
    if isinstance(fn, type):
        rewards, seconds = _model_rewards(bench, fn, samples)
        return _judge_rewards(bench, fn, samples, rewards) + f", {seconds:.1f} s with loading"
    # As in a run, the function of an evaluation set gets single samples if it has the parameter for one.
    names = parameters(fn)[0] if callable(fn) else ()
    grouped = bool(bench.args.group_rm) and not (bench.evaluates and "sample" in names)
    words = "fn(args, samples)" if grouped else "fn(args, sample)"
    check_signature(fn, words, bench.args, samples if grouped else samples[0])
    if not grouped and "samples" in names and "sample" not in names:
        raise wrong(fn, "it has a parameter named samples, but without --group-rm it is called with one sample")

    async def score() -> list[Any]:
        if grouped:
            groups = [list(flatten(group)) for group in bench.answered(rewards=False)]
            scored = []
            for group in groups:
                for one in group:
                    one.reward = None
                given = await call(fn, bench.args, group)
                _check_count(fn, given, len(group))
                scored += list(given)
            return scored
        return [await call(fn, bench.args, copy.deepcopy(sample)) for sample in samples]

    guarded(fn, score, bench.limit, loop=True)
    outcome = guarded(fn, score, bench.limit, loop=True)
    if outcome.stall:
        bench.notes.append(
            f"it blocks its event loop for {outcome.stall:.1f} s at {outcome.place}, so other rewards have to wait. "
            "slime.rollout.rm_hub.outcome.verify runs such code in processes that can be killed"
        )
    each = outcome.seconds / max(len(samples), 1)
    return _judge_rewards(bench, fn, samples, outcome.result) + f", {each * 1000:.1f} ms each"


def _model_rewards(bench: Bench, fn: type, samples: list[Sample]) -> tuple[list[Any], float]:
    from slime.rollout.rm_hub import custom
    from slime.rollout.rm_hub.dispatch import batched_async_rm

    try:
        custom.check_class(fn, bench.args.rm_model_path)
    except (TypeError, ValueError) as error:
        raise wrong(fn, str(error)) from error
    compute: Hook = getattr(fn, "compute_reward")  # noqa: B009 - of a user's class, which mypy does not know
    columns = [[sample.prompt for sample in samples], [sample.response for sample in samples]]
    extra = supported_kwargs(compute, labels=[], metadata=[])
    check_signature(compute, "compute_reward(prompts, responses)", object(), *columns, **extra)
    limit = bench.args.reward_timeout + STARTUP_SECONDS
    outcome = guarded(fn, lambda: batched_async_rm(bench.args, samples), limit, loop=True)
    if samples[0].reward_timed_out:
        raise wrong(compute, str(samples[0].metadata.get("reward_failure")))
    return outcome.result, outcome.seconds


def _check_count(fn: Hook, given: object, count: int) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        got = f"{len(given)} rewards" if isinstance(given, list | tuple) else repr(given)
        raise wrong(fn, f"it returned {got} for a group of {count}: return a list with one reward per sample")


def _judge_rewards(bench: Bench, fn: Hook, samples: Sequence[Sample], rewards: Sequence[object]) -> str:
    key, option = bench.args.reward_key, "--reward-key"
    if bench.evaluates and bench.args.eval_reward_key:
        key, option = bench.args.eval_reward_key, "--eval-reward-key"
    values = []
    scored = [reward for reward in rewards if reward is not None]
    if rewards and not scored:
        raise wrong(fn, "it returned None: a return statement is missing on some path")
    if len(scored) < len(rewards):
        bench.notes.append(
            f"it returned None for {len(rewards) - len(scored)} of {len(rewards)} answers: it abstains, and such "
            "samples are left out. If it should not, a return statement is missing on some path"
        )
    for reward in scored:
        if isinstance(reward, dict):
            if key is None:
                keys = ", ".join(map(str, reward))
                raise wrong(fn, f"it returns a dict with the keys {keys}: select one with {option}")
            if key not in reward:
                raise wrong(fn, f"its dict has no {key!r} ({option}), only {', '.join(map(str, reward))}")
            bench.entries = bench.entries if bench.evaluates else reward
            reward = reward[key]
        try:
            number = float(reward)  # type: ignore[arg-type]  # this tests whether it is a number
        except (TypeError, ValueError):
            raise wrong(fn, f"it returned {reward!r} ({type(reward).__name__}), which is not a number") from None
        if isinstance(reward, str) or not math.isfinite(number):
            raise wrong(fn, f"it returned {reward!r}, but a reward must be a finite number")
        values.append(number)
    if len(set(values)) == 1 and bench.generated is None and any(sample.label is not None for sample in samples):
        bench.notes.append(
            f"it returns {values[0]:g} for all {len(values)} answers, including \\boxed{{label}} and 'I do not know.'; "
            "without differences the model cannot learn"
        )
    return f"{len(values)} rewards from {min(values):g} to {max(values):g}"


def reward_post_process(bench: Bench, fn: Hook) -> str:
    samples = flatten(bench.answered())
    result = guarded(fn, lambda: fn(bench.args, samples), bench.limit).result
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong(fn, f"its result has the type {type(result).__name__}, but must be (raw_rewards, rewards)")
    for name, values in zip(("raw_rewards", "rewards"), result, strict=True):
        if len(values) != len(samples):
            raise wrong(fn, f"it returned {len(values)} {name} for {len(samples)} samples")
        [float(value) for value in values]
    return f"{len(samples)} rewards, processed from {min(map(float, result[1])):g} to {max(map(float, result[1])):g}"
