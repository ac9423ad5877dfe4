"""One probe per hook of the rollout: call it as the run does, on small samples, and judge what comes back.

A probe returns a few words about what it saw, raises :class:`Complaint`, or adds to ``bench.notes`` what
works but will surprise.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from slime.cli.hook_bench import Bench
from slime.cli.hook_guard import Complaint, check_picklable, check_signature, guarded, not_async, wrong
from slime.cli.hook_masks import appends_recorded, check_mask
from slime.cli.hook_turns import check_turns
from slime.data.sample import Sample, flatten
from slime.rollout.hooks import call, parameters, supported_kwargs
from slime.rollout.verifier.pool import STARTUP_SECONDS

Probe = Callable[[Bench, Any], str]
AGENT_TOKENS = 512  # of a conversation: an untrained model does not end its turns


def generate(bench: Bench, fn: Any) -> str:
    """``await fn(args, sample, sampling_params[, evaluation])``, or the list form."""
    from slime.rollout.custom_generate import call_list, call_single, takes_list
    from slime.rollout.settings import SamplingSettings

    args = bench.args
    params = {**SamplingSettings.from_args(args).request_params(), "sampling_seed": 1}
    sample = Sample()
    if takes_list(fn):
        check_signature(fn, "fn(args, samples, evaluation=…)", args, [sample], **supported_kwargs(fn, evaluation=False))
    else:
        check_signature(
            fn, "fn(args, sample, sampling_params)", args, sample, params, **supported_kwargs(fn, evaluation=False)
        )
    bench.start_engine()

    async def whole_group() -> list[Any]:
        group = flatten(bench.prompts()[0])
        if takes_list(fn):
            return list(await call_list(fn, args, group, False))
        return list(await asyncio.gather(*(call_single(fn, args, one, dict(params), False) for one in group)))

    guarded(fn, whole_group, bench.limit, loop=True)  # imports and connections of a first call are not counted
    with appends_recorded():
        outcome = guarded(fn, whole_group, bench.limit, loop=True)
    if outcome.stall:
        raise Complaint(
            f"it holds the event loop for {outcome.stall:.1f} s: meanwhile no other sample goes on. Await asynchronous "
            "clients (slime.utils.http_utils.post), or put blocking work into asyncio.to_thread",
            outcome.place,
        )
    leaves = flatten(outcome.result)
    for one in leaves:
        _check_generated(bench, fn, one)
        check_mask(bench, fn, one)
    bench.generated = [outcome.result]
    if all(one.rollout_log_probs is None for one in leaves):
        bench.notes.append("no rollout_log_probs: the trainer recomputes the old log-probs (one more forward pass)")
    turns = check_turns(bench, fn)
    fan_out = f" from {len(outcome.result)} calls" if len(leaves) != len(outcome.result) else ""
    lengths = [one.response_length for one in leaves]
    return f"{len(leaves)} samples{fan_out}, {min(lengths)} to {max(lengths)} tokens, {outcome.seconds:.1f} s; {turns}"


def agent(bench: Bench, fn: Any) -> str:
    """``run(task)``, with the endpoint that it gets in a run."""
    from slime.agent.program import Task
    from slime.agent.rollout import generate as run_agent
    from slime.agent.server import stop_agent_server
    from slime.rollout.custom_generate import call_single
    from slime.rollout.settings import SamplingSettings

    check_signature(fn, "run(task)", Task("", None, {}, "", "", ""))
    bench.start_engine()
    args = copy.copy(bench.args)
    args.rollout_max_response_len, args.agent_timeout = AGENT_TOKENS, bench.limit
    params = {**SamplingSettings.from_args(args).request_params(), "sampling_seed": 1}

    async def whole_group() -> list[Any]:
        try:
            group = flatten(bench.prompts()[0])
            return list(await asyncio.gather(*(call_single(run_agent, args, one, params, False) for one in group)))
        finally:
            await stop_agent_server()

    outcome = guarded(fn, whole_group, bench.limit + STARTUP_SECONDS, loop=True)
    leaves = flatten(outcome.result)
    for one in leaves:
        if one.reward_timed_out and one.status is Sample.Status.FAILED:
            raise wrong(fn, str(one.metadata["reward_failure"]))
        if one.reward_timed_out:
            bench.notes.append(
                f"it does not catch the refusal of a conversation that is too long (here, {AGENT_TOKENS} tokens): "
                "such samples are left out of training"
            )
        else:
            _check_generated(bench, fn, one)
    bench.generated = [outcome.result]
    own = sum(one.reward is not None for one in leaves)
    return f"{len(leaves)} samples of {len(outcome.result)} programs, {own} with rewards, {outcome.seconds:.1f} s"


def _check_generated(bench: Bench, fn: Any, sample: Sample) -> None:
    if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        raise wrong(fn, f"a sample is left {sample.status.value}: set COMPLETED or TRUNCATED")
    vocabulary = len(bench.tokenizer)
    bad = [token for token in sample.tokens if not isinstance(token, int) or not 0 <= token < vocabulary]
    if bad:
        raise wrong(fn, f"sample.tokens holds {bad[0]!r}, which is no token id (ints below {vocabulary})")
    if len(sample.tokens) == sample.response_length:
        raise wrong(fn, "sample.tokens holds the response only: it must be prompt tokens + response tokens")
    mask = sample.loss_mask
    if mask is not None and any(entry not in (0, 1) for entry in mask):
        raise wrong(fn, f"sample.loss_mask holds {next(m for m in mask if m not in (0, 1))!r}; only 0 and 1 may be")
    if mask is not None and not any(mask):
        bench.notes.append("the loss_mask of a sample is 0 everywhere: nothing of it is trained on")
    for value in sample.rollout_log_probs or ():
        if not isinstance(value, int | float) or math.isnan(value) or value > 1e-4:
            raise wrong(fn, f"sample.rollout_log_probs holds {value!r}: log-probabilities are at most 0")
    check_picklable("sample", sample)


def sample_hook(bench: Bench, fn: Any) -> str:
    sample = flatten(bench.answered())[0]
    keywords = supported_kwargs(fn, rollout_id=0, evaluation=False)
    check_signature(fn, "hook(args, sample, rollout_id=…, evaluation=…)", bench.args, sample, **keywords)
    outcome = guarded(fn, lambda: call(fn, bench.args, sample, **keywords), bench.limit, loop=True)
    if outcome.result is not None and not isinstance(outcome.result, Sample):
        raise wrong(fn, f"it returned {type(outcome.result).__name__}; it must return None or a Sample")
    check_picklable("sample", outcome.result or sample)
    return "returned " + ("None" if outcome.result is None else "a Sample")


def reward(bench: Bench, fn: Any, grouped: bool | None = None) -> str:
    """Single: ``await fn(args, sample)``; with ``--group-rm`` ``await fn(args, samples)``; or a class."""
    from slime.rollout.rm_hub import model_rm

    samples = flatten(bench.answered(rewards=False))
    for sample in samples:
        sample.reward = None
    if model_rm.is_model_class(fn):
        rewards, seconds = _model_rewards(bench, fn, samples)
        return _judge_rewards(bench, fn, samples, rewards) + f", {seconds:.1f} s with loading"
    grouped = bool(bench.args.group_rm) if grouped is None else grouped
    words = "fn(args, samples)" if grouped else "fn(args, sample)"
    check_signature(fn, words, bench.args, samples if grouped else samples[0])
    names = parameters(fn)[0]
    if not grouped and "samples" in names and "sample" not in names:
        raise wrong(fn, "its parameter is called samples, but without --group-rm it gets one sample")

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
            f"it blocks its event loop for {outcome.stall:.1f} s at {outcome.place}: other rewards wait for it. "
            "slime.rollout.rm_hub.outcome.verify runs such work in processes that can be killed"
        )
    each = outcome.seconds / max(len(samples), 1)
    return _judge_rewards(bench, fn, samples, outcome.result) + f", {each * 1000:.1f} ms each"


def _model_rewards(bench: Bench, fn: Any, samples: list[Sample]) -> tuple[list[Any], float]:
    from slime.rollout.rm_hub import batched_async_rm, model_rm

    try:
        model_rm.check_class(fn, bench.args.rm_model_path)
    except (TypeError, ValueError) as error:
        raise wrong(fn, str(error)) from error
    compute = fn.compute_reward
    columns = [[sample.prompt for sample in samples], [sample.response for sample in samples]]
    extra = supported_kwargs(compute, labels=[], metadata=[])
    check_signature(compute, "compute_reward(prompts, responses)", object(), *columns, **extra)
    limit = bench.args.reward_timeout + STARTUP_SECONDS
    outcome = guarded(fn, lambda: batched_async_rm(bench.args, samples), limit, loop=True)
    if samples[0].reward_timed_out:
        raise wrong(compute, str(samples[0].metadata.get("reward_failure")))
    return outcome.result, outcome.seconds


def _check_count(fn: Any, given: Any, count: int) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        got = f"{len(given)} rewards" if isinstance(given, list | tuple) else repr(given)
        raise wrong(fn, f"it returned {got} for a group of {count}: return a list with one reward per sample")


def _judge_rewards(bench: Bench, fn: Any, samples: Sequence[Sample], rewards: Sequence[Any]) -> str:
    key = bench.args.reward_key
    values = []
    for reward in rewards:
        if reward is None:
            raise wrong(fn, "it returned None: a return is missing on some path")
        if isinstance(reward, dict):
            if key is None:
                keys = ", ".join(map(str, reward))
                raise wrong(fn, f"it returns a dict with the keys {keys}: say which one trains with --reward-key")
            if key not in reward:
                raise wrong(fn, f"its dict has no {key!r} (--reward-key), only {', '.join(map(str, reward))}")
            reward = reward[key]
        try:
            number = float(reward)
        except (TypeError, ValueError):
            raise wrong(fn, f"it returned {reward!r} ({type(reward).__name__}), which is no number") from None
        if isinstance(reward, str) or not math.isfinite(number):
            raise wrong(fn, f"it returned {reward!r}: a reward is a finite number")
        values.append(number)
    if len(set(values)) == 1 and bench.generated is None and any(sample.label is not None for sample in samples):
        bench.notes.append(
            f"it gives {values[0]:g} to all {len(values)} answers, among them \\boxed{{label}} and 'I do not know.': "
            "without a difference there is nothing to learn"
        )
    return f"{len(values)} rewards from {min(values):g} to {max(values):g}"


def dynamic_filter(bench: Bench, fn: Any) -> str:
    from slime.rollout.filter_hub.base_types import call_dynamic_filter

    not_async(fn)
    group = bench.answered()[0]
    check_signature(fn, "fn(args, group)", bench.args, group)
    answers, key = [], bench.args.reward_key
    for rewards in ("mixed", "all 0", "all 1"):
        tried = copy.deepcopy(group)
        for sample in flatten(tried) if rewards != "mixed" else ():
            value = float(rewards == "all 1")
            by_key = sample.reward if isinstance(sample.reward, dict) else None
            sample.reward = value if by_key is None or key is None else {**by_key, key: value}
        kept = guarded(fn, lambda tried=tried: call_dynamic_filter(fn, bench.args, tried), bench.limit).result  # type: ignore[misc]
        answers.append(f"{rewards}: {'kept' if kept.keep else 'dropped'}")
    if all(answer.endswith("dropped") for answer in answers):
        bench.notes.append("it drops every group that was tried: a rollout that keeps nothing ends at --phase-timeout")
    return ", ".join(answers)


def buffer_filter(bench: Bench, fn: Any) -> str:
    not_async(fn)
    groups = [*bench.answered(), *bench.answered()]
    buffer = list(groups)
    check_signature(fn, "fn(args, rollout_id, buffer, num_samples)", bench.args, None, buffer, 2)
    chosen = guarded(fn, lambda: fn(bench.args, None, buffer, 2), bench.limit).result
    if not isinstance(chosen, list) or any(isinstance(group, Sample) for group in chosen):
        raise wrong(fn, f"it returned {type(chosen).__name__}; it must return a list of groups")
    if len(chosen) > 2 or len({id(group) for group in chosen}) != len(chosen):
        raise wrong(fn, f"asked for 2 groups it returned {len(chosen)}, or one of them twice")
    if any(group is kept for group in chosen for kept in buffer):
        bench.notes.append("it leaves in the buffer what it returns; here that is removed for it, elsewhere not")
    return f"chose {len(chosen)} of {len(groups)} groups, {len(buffer)} stay"


def data_source(bench: Bench, fn: Any) -> str:
    """A class with ``get_samples, add_samples, save, load, __len__``."""
    check_signature(fn, "DataSource(args)", bench.args)
    missing = [name for name in ("get_samples", "add_samples", "save", "load", "__len__") if not hasattr(fn, name)]
    if missing:
        raise wrong(fn, f"the class has no {', '.join(missing)}")
    source = guarded(fn, lambda: fn(bench.args), bench.limit).result
    groups = guarded(fn, lambda: source.get_samples(PAIR), bench.limit).result
    _check_groups(fn, groups, bench.args.n_samples_per_prompt)
    if len(groups) != PAIR:
        raise wrong(fn.get_samples, f"get_samples({PAIR}) gave {len(groups)} groups")
    guarded(fn, lambda: source.add_samples(groups), bench.limit)
    length = guarded(fn, lambda: len(source), bench.limit).result
    guarded(fn, lambda: source.save(0), bench.limit)
    bench.args.load = bench.args.save
    again = guarded(fn, lambda: fn(bench.args), bench.limit).result
    guarded(fn, lambda: again.load(0), bench.limit)
    return f"gives groups of {len(groups[0])}, {length} prompts an epoch, saves and loads"


PAIR = 2


def _check_groups(fn: Any, groups: Any, size: int) -> None:
    if not isinstance(groups, list) or not groups or not all(isinstance(group, list) and group for group in groups):
        raise wrong(
            fn,
            f"it gave {type(groups).__name__} of {type(groups[0]).__name__ if groups else 'nothing'}: "
            "groups are lists of samples, one list per prompt",
        )
    for sample in flatten(groups):
        if not isinstance(sample, Sample):
            raise wrong(fn, f"a group holds a {type(sample).__name__}, not a Sample")
    if len(groups[0]) != size:
        raise wrong(fn, f"a group has {len(groups[0])} samples, --n-samples-per-prompt is {size}")


def sample_filter(bench: Bench, fn: Any) -> str:
    not_async(fn)
    groups = bench.answered()
    check_signature(fn, "fn(args, groups)", bench.args, groups)
    result = guarded(fn, lambda: fn(bench.args, groups), bench.limit).result
    if result is not None:
        bench.notes.append(f"what it returned ({type(result).__name__}) is not used: set sample.remove_sample = True")
    removed = [sample for sample in flatten(groups) if sample.remove_sample]
    if len(removed) == len(flatten(groups)):
        bench.notes.append("it removes all samples: nothing would be trained on")
    return f"removes {len(removed)} of {len(flatten(groups))} samples"


def all_samples(bench: Bench, fn: Any) -> str:
    not_async(fn)
    groups = bench.answered()
    check_signature(fn, "fn(args, all_groups, data_source)", bench.args, groups, bench.source)
    guarded(fn, lambda: fn(bench.args, groups, bench.source), bench.limit)
    return f"saw {len(groups)} groups"


def reward_post_process(bench: Bench, fn: Any) -> str:
    not_async(fn)
    samples = flatten(bench.answered())
    check_signature(fn, "fn(args, samples)", bench.args, samples)
    result = guarded(fn, lambda: fn(bench.args, samples), bench.limit).result
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong(fn, f"it returned {type(result).__name__}; it must return (raw_rewards, rewards)")
    for name, values in zip(("raw_rewards", "rewards"), result, strict=True):
        if len(values) != len(samples):
            raise wrong(fn, f"it returned {len(values)} {name} for {len(samples)} samples")
        [float(value) for value in values]
    return f"{len(samples)} rewards, trained ones from {min(map(float, result[1])):g} to {max(map(float, result[1])):g}"


def convert(bench: Bench, fn: Any) -> str:
    """``fn(args, samples)``: through the converter and the split over ranks, as in a run."""
    from slime.data.convert import samples_to_train_data, split_train_data

    not_async(fn)
    groups = bench.answered()
    check_signature(fn, "fn(args, samples)", bench.args, flatten(groups))
    args = copy.copy(bench.args)
    data = guarded(fn, lambda: samples_to_train_data(args, groups), bench.limit).result
    args.global_batch_size, args.micro_batch_size, args.use_dynamic_batch_size = len(set(data["rollout_ids"])), 1, False
    guarded(fn, lambda: split_train_data(args, data, 1), bench.limit)
    return f"{len(data['tokens'])} samples with {', '.join(sorted(data))}"


def rollout_log(bench: Bench, fn: Any) -> str:
    not_async(fn)
    samples = flatten(bench.answered())
    check_signature(fn, "fn(rollout_id, args, samples, metrics, rollout_time)", 0, bench.args, samples, {}, 1.0)
    result = guarded(fn, lambda: fn(0, bench.args, samples, {}, 1.0), bench.limit).result
    return "replaces the usual metrics" if result else "adds to the usual metrics"


def eval_log(bench: Bench, fn: Any) -> str:
    not_async(fn)
    samples = flatten(bench.answered())
    part = {"rewards": [1.0] * len(samples), "truncated": [sample.truncated for sample in samples], "samples": samples}
    check_signature(fn, "fn(rollout_id, args, data, metrics)", 0, bench.args, {"set": part}, {})
    result = guarded(fn, lambda: fn(0, bench.args, {"set": part}, {}), bench.limit).result
    return "replaces the usual metrics" if result else "adds to the usual metrics"


def rollout(bench: Bench, fn: Any) -> str:
    """The whole rollout, on the data and the engine of the bench."""
    return _rollout(bench, fn, evaluation=False)


def evaluation(bench: Bench, fn: Any) -> str:
    return _rollout(bench, fn, evaluation=True)


def _rollout(bench: Bench, fn: Any, evaluation: bool) -> str:
    from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn

    not_async(fn)
    check_signature(
        fn, "fn(args, rollout_id, data_source, evaluation=…)", bench.args, 0, bench.source, evaluation=False
    )
    bench.start_engine()
    outcome = guarded(fn, lambda: call_rollout_fn(fn, bench.args, 0, bench.source, evaluation), bench.limit)
    output = outcome.result
    if isinstance(output, RolloutFnTrainOutput):
        _check_groups(fn, output.samples, bench.args.n_samples_per_prompt)
        for sample in flatten(output.samples):
            _check_generated(bench, fn, sample)
        return f"{len(output.samples)} groups in {outcome.seconds:.1f} s"
    for name, part in output.data.items():
        if "rewards" not in part:
            raise wrong(fn, f"data set {name!r} has no 'rewards', only {', '.join(part)}")
    return f"data sets {', '.join(output.data) or '(none)'} in {outcome.seconds:.1f} s"


PROBES: dict[str, Probe] = {
    "agent_function_path": agent,
    "custom_generate_function_path": generate,
    "data_source_path": data_source,
    "rollout_sample_hook_path": sample_hook,
    "custom_rm_path": reward,
    "dynamic_sampling_filter_path": dynamic_filter,
    "buffer_filter_path": buffer_filter,
    "rollout_sample_filter_path": sample_filter,
    "rollout_all_samples_process_path": all_samples,
    "custom_reward_post_process_path": reward_post_process,
    "custom_convert_samples_to_train_data_path": convert,
    "custom_rollout_log_function_path": rollout_log,
    "custom_eval_rollout_log_function_path": eval_log,
    "rollout_function_path": rollout,
    "eval_function_path": evaluation,
}
"""By the name of the argument; in this order, so that later probes see samples of the user's generate function."""
