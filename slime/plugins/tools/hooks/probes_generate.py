"""Probes of hooks for generation and rewards: generate functions, agents, sample hooks, rollout and
reward functions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from slime.data.sample import Sample, flatten
from slime.rollout.base_types import call, parameters, supported_kwargs
from slime.rollout.custom_generate import takes_list
from slime.rollout.state import GenerateState, request_params
from slime.rollout.verifier.pool import STARTUP_SECONDS

from .bench import Bench
from .guard import (
    Complaint,
    Hook,
    check_picklable,
    check_signature,
    guarded,
    wrong,
)
from .turns import check_turns, on_group

AGENT_TOKENS = 512  # limit of a conversation: an untrained model does not end its turns


def generate(bench: Bench, fn: Hook) -> str:
    """Test ``await fn(args, sample, sampling_params[, evaluation])``, or the form with a list of
    samples.
    """
    bench.start_engine()
    args = bench.args
    # First its signature, for a message that says how it is called.
    words = "fn(args, sample, sampling_params)"
    given: tuple[object, ...] = (Sample(), request_params(args))
    if takes_list(fn):
        words = "fn(args, samples, evaluation=…)"
        given = ([Sample()],)
    check_signature(fn, words, args, *given, **supported_kwargs(fn, evaluation=False))
    whole_group = lambda: on_group(fn, GenerateState(args), flatten(bench.prompts()[0]))  # noqa: E731
    # a first call, so that imports and connections are not measured
    guarded(fn, whole_group, bench.limit, loop=True)
    outcome = guarded(fn, whole_group, bench.limit, loop=True)
    if outcome.stall:
        raise Complaint(
            f"it blocks the event loop for {outcome.stall:.1f} s, in which no other sample can "
            "continue. Await async clients (slime.utils.http_utils.post), or run blocking code "
            "with asyncio.to_thread",
            outcome.place,
        )
    # The samples that it returned, which later probes take as well.
    leaves = flatten(outcome.result)
    for one in leaves:
        _check_generated(bench, fn, one)
    bench.generated = [outcome.result]
    if all(one.rollout_log_probs is None for one in leaves):
        bench.notes.append(
            "without rollout_log_probs, the trainer needs another forward pass for the old "
            "log-probs"
        )
    turns = check_turns(bench, fn)
    fan_out = f" from {len(outcome.result)} calls" if len(leaves) != len(outcome.result) else ""
    lengths = [one.response_length for one in leaves]
    return (
        f"{len(leaves)} samples{fan_out}, {min(lengths)} to {max(lengths)} tokens, "
        f"{outcome.seconds:.1f} s; {turns}"
    )


def agent(bench: Bench, fn: Hook) -> str:
    """Test ``run(task)`` with the same endpoint as in a run."""
    from slime.plugins.agents.rollout import generate as run_agent
    from slime.plugins.agents.server import stop_agent_server

    bench.start_engine()
    args = bench.args.with_values(rollout_max_response_len=AGENT_TOKENS, agent_timeout=bench.limit)

    async def whole_group() -> list[Any]:
        try:
            return await on_group(run_agent, GenerateState(args), flatten(bench.prompts()[0]))
        finally:
            await stop_agent_server()

    outcome = guarded(fn, whole_group, bench.limit + STARTUP_SECONDS, loop=True)
    leaves = flatten(outcome.result)
    for one in leaves:
        if one.reward_timed_out and one.status is Sample.Status.FAILED:
            raise wrong(fn, str(one.metadata["reward_failure"]))
        if one.reward_timed_out:
            bench.notes.append(
                "it does not catch the error for a conversation that is too long (here "
                f"{AGENT_TOKENS} tokens), so such samples are left out of training"
            )
        else:
            _check_generated(bench, fn, one)
    bench.generated = [outcome.result]
    own = sum(one.reward is not None for one in leaves)
    return (
        f"{len(leaves)} samples of {len(outcome.result)} programs, {own} with rewards, "
        f"{outcome.seconds:.1f} s"
    )


def _check_generated(bench: Bench, fn: Hook, sample: Sample) -> None:
    if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        raise wrong(
            fn, f"a sample has the status {sample.status.value}: set COMPLETED or TRUNCATED"
        )
    vocabulary = len(bench.tokenizer)
    # Everything that the trainer relies on.
    bad = [
        token
        for token in sample.tokens
        if not isinstance(token, int) or not 0 <= token < vocabulary
    ]
    if bad:
        raise wrong(
            fn,
            f"sample.tokens contains {bad[0]!r}, which is not a token id (an int below "
            f"{vocabulary})",
        )
    if len(sample.tokens) == sample.response_length:
        raise wrong(
            fn,
            "sample.tokens contains only the response: it must be prompt tokens + response tokens",
        )
    mask = sample.loss_mask
    if mask is not None and any(entry not in (0, 1) for entry in mask):
        raise wrong(
            fn,
            f"sample.loss_mask contains {next(m for m in mask if m not in (0, 1))!r}, not only 0 "
            "and 1",
        )
    if mask is not None and not any(mask):
        bench.notes.append("the loss_mask of a sample is 0 everywhere, so it is not trained on")
    for value in sample.rollout_log_probs or ():
        if not isinstance(value, int | float) or math.isnan(value) or value > 1e-4:
            raise wrong(
                fn, f"sample.rollout_log_probs contains {value!r}, but log-probs are at most 0"
            )
    check_picklable(sample)


def sample_hook(bench: Bench, fn: Hook) -> str:
    sample = flatten(bench.answered())[0]
    keywords = supported_kwargs(fn, rollout_id=0, evaluation=False)
    check_signature(
        fn, "hook(args, sample, rollout_id=…, evaluation=…)", bench.args, sample, **keywords
    )
    outcome = guarded(fn, lambda: call(fn, bench.args, sample, **keywords), bench.limit, loop=True)
    if outcome.result is not None and not isinstance(outcome.result, Sample):
        raise wrong(
            fn,
            f"its result has the type {type(outcome.result).__name__}, but must be None or a "
            "Sample",
        )
    check_picklable(outcome.result or sample)
    return "returned " + ("None" if outcome.result is None else "a Sample")


def rollout(bench: Bench, fn: Hook, evaluation: bool = False) -> str:
    """Test a rollout function with the data and the engine of the bench."""
    from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn

    bench.start_engine()
    source = bench.source
    args = bench.evaluation() if evaluation else bench.args
    # The tiny model solves nothing, so that a filter would drop groups without end. It has a probe
    # of its own.
    args = args.with_values(dynamic_sampling_filter_path=None)
    # The whole function with the data and the engine, as the rollout manager calls it.
    outcome = guarded(fn, lambda: call_rollout_fn(fn, args, 0, source, evaluation), bench.limit)
    output = outcome.result
    if isinstance(output, RolloutFnTrainOutput):
        check_groups(fn, output.samples, bench.args.n_samples_per_prompt)
        for sample in flatten(output.samples):
            _check_generated(bench, fn, sample)
        return f"{len(output.samples)} groups in {outcome.seconds:.1f} s"
    for name, part in output.data.items():
        if "rewards" not in part:
            raise wrong(fn, f"data set {name!r} has no 'rewards', only {', '.join(part)}")
    return f"data sets {', '.join(output.data) or '(none)'} in {outcome.seconds:.1f} s"


def reward(bench: Bench, fn: Hook) -> str:
    """Test ``await fn(args, sample)``, or with ``--group-rm`` ``await fn(args, samples)``, or a
    class.
    """
    samples = flatten(bench.answered(rewards=False))
    for sample in samples:
        sample.reward = None
    # A class is a reward model, which processes of its own load.
    if isinstance(fn, type):
        rewards, seconds = _model_rewards(bench, fn, samples)
        return _judge_rewards(bench, fn, samples, rewards) + f", {seconds:.1f} s with loading"
    # As in a run, the function of an evaluation set gets single samples if it has the parameter for
    # one.
    names = parameters(fn)[0] if callable(fn) else ()
    grouped = bool(bench.args.group_rm) and not (bench.evaluates and "sample" in names)
    words = "fn(args, samples)" if grouped else "fn(args, sample)"
    check_signature(fn, words, bench.args, samples if grouped else samples[0])
    if not grouped and "samples" in names and "sample" not in names:
        raise wrong(
            fn,
            "it has a parameter named samples, but without --group-rm it is called with one sample",
        )

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

    # Twice, so that imports and connections are not measured.
    guarded(fn, score, bench.limit, loop=True)
    outcome = guarded(fn, score, bench.limit, loop=True)
    if outcome.stall:
        bench.notes.append(
            f"it blocks its event loop for {outcome.stall:.1f} s at {outcome.place}, so other "
            "rewards have to wait. slime.rollout.rm_hub.outcome.verify runs such code in "
            "processes that can be killed"
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
        raise wrong(
            fn,
            f"it returned {got} for a group of {count}: return a list with one reward per sample",
        )


def _judge_rewards(
    bench: Bench, fn: Hook, samples: Sequence[Sample], rewards: Sequence[object]
) -> str:
    key = bench.args.reward_key
    option = "--reward-key"
    if bench.evaluates and bench.args.eval_reward_key:
        key = bench.args.eval_reward_key
        option = "--eval-reward-key"
    # None is an abstention, if it does not come for every answer.
    values = []
    scored = [reward for reward in rewards if reward is not None]
    if rewards and not scored:
        raise wrong(fn, "it returned None: a return statement is missing on some path")
    if len(scored) < len(rewards):
        bench.notes.append(
            f"it returned None for {len(rewards) - len(scored)} of {len(rewards)} answers: it "
            "abstains, and such samples are left out. If it should not, a return statement is "
            "missing on some path"
        )
    # Everything else must be one finite number, or a dict with one under the key of the run.
    for reward in scored:
        if isinstance(reward, dict):
            if key is None:
                keys = ", ".join(map(str, reward))
                raise wrong(fn, f"it returns a dict with the keys {keys}: select one with {option}")
            if key not in reward:
                raise wrong(
                    fn, f"its dict has no {key!r} ({option}), only {', '.join(map(str, reward))}"
                )
            bench.entries = bench.entries if bench.evaluates else reward
            reward = reward[key]
        try:
            number = float(reward)  # type: ignore[arg-type]  # this tests whether it is a number
        except (TypeError, ValueError):
            raise wrong(
                fn, f"it returned {reward!r} ({type(reward).__name__}), which is not a number"
            ) from None
        if isinstance(reward, str) or not math.isfinite(number):
            raise wrong(fn, f"it returned {reward!r}, but a reward must be a finite number")
        values.append(number)
    if (
        len(set(values)) == 1
        and bench.generated is None
        and any(sample.label is not None for sample in samples)
    ):
        bench.notes.append(
            f"it returns {values[0]:g} for all {len(values)} answers, including \\boxed{{label}} "
            "and 'I do not know.'; without differences the model cannot learn"
        )
    return f"{len(values)} rewards from {min(values):g} to {max(values):g}"


def reward_post_process(bench: Bench, fn: Hook) -> str:
    samples = flatten(bench.answered())
    result = bench.call(fn, bench.args, samples)
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong(
            fn,
            f"its result has the type {type(result).__name__}, but must be (raw_rewards, rewards)",
        )
    for name, values in zip(("raw_rewards", "rewards"), result, strict=True):
        if len(values) != len(samples):
            raise wrong(fn, f"it returned {len(values)} {name} for {len(samples)} samples")
        [float(value) for value in values]
    return (
        f"{len(samples)} rewards, processed from {min(map(float, result[1])):g} to "
        f"{max(map(float, result[1])):g}"
    )


def check_groups(fn: Hook, groups: object, size: int) -> None:
    # The result of any function may be anything, so that nothing of it is assumed.
    first = type(groups[0]).__name__ if isinstance(groups, list) and groups else "nothing"
    if (
        not isinstance(groups, list)
        or not groups
        or not all(isinstance(group, list) and group for group in groups)
    ):
        raise wrong(
            fn,
            f"it returned a {type(groups).__name__} of {first}: return a list of samples for each "
            "prompt",
        )
    for sample in flatten(groups):
        if not isinstance(sample, Sample):
            raise wrong(fn, f"a group contains a {type(sample).__name__}, which is not a Sample")
    if len(groups[0]) != size:
        raise wrong(
            fn, f"a group has {len(groups[0])} samples, but --n-samples-per-prompt is {size}"
        )
