"""Probes of the hooks of a rollout. A probe calls a hook as a run does, with small samples, and checks the result.

A probe returns a short description of the result, or raises :class:`Complaint`. It adds a note to ``bench.notes`` if
the hook works but may have an unexpected effect. Probes of generation and of rewards are in separate files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slime.data.sample import Sample, flatten
from slime.data.source import has_files, is_stateful
from slime.data.value_files import read_state, write_state
from slime.plugins.tools.hooks.bench import Bench, one_step
from slime.plugins.tools.hooks.guard import Hook, check_signature, guarded, not_async, wrong
from slime.plugins.tools.hooks.probes_generate import agent, check_groups, generate, rollout, sample_hook
from slime.plugins.tools.hooks.probes_reward import reward, reward_post_process

Probe = Callable[[Bench, Hook], str]
PAIR = 2


def dynamic_filter(bench: Bench, fn: Hook) -> str:
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
        bench.notes.append("it drops all tested groups; a rollout without any group fails after --phase-timeout")
    return ", ".join(answers)


def buffer_filter(bench: Bench, fn: Hook) -> str:
    groups = [*bench.answered(), *bench.answered()]
    buffer = list(groups)
    chosen = guarded(fn, lambda: fn(bench.args, None, buffer, 2), bench.limit).result
    if not isinstance(chosen, list) or any(isinstance(group, Sample) for group in chosen):
        raise wrong(fn, f"its result has the type {type(chosen).__name__}, but must be a list of groups")
    if len(chosen) > 2 or len({id(group) for group in chosen}) != len(chosen):
        raise wrong(fn, f"asked for 2 groups, it returned {len(chosen)} groups, or one of them twice")
    if any(group is kept for group in chosen for kept in buffer):
        bench.notes.append("it does not remove the returned groups from the buffer; slime does this, but others do not")
    return f"chose {len(chosen)} of {len(groups)} groups, {len(buffer)} remain"


def data_source(bench: Bench, fn: Hook) -> str:
    """Test a class with ``get_samples, add_samples, __len__`` and the methods that save and restore its state."""
    missing = [name for name in ("get_samples", "add_samples", "__len__") if not hasattr(fn, name)]
    if missing:
        raise wrong(fn, f"the class has no {', '.join(missing)}")
    stateful, files = is_stateful(fn), has_files(fn)
    if not stateful and not files:
        raise wrong(fn, "the class has neither state_dict and load_state_dict nor save and load, so it cannot resume")
    source = guarded(fn, lambda: fn(bench.args), bench.limit).result
    groups = guarded(fn, lambda: source.get_samples(PAIR), bench.limit).result
    check_groups(fn, groups, bench.args.n_samples_per_prompt)
    if len(groups) != PAIR:
        raise wrong(source.get_samples, f"get_samples({PAIR}) returned {len(groups)} groups")
    guarded(fn, lambda: source.add_samples(groups), bench.limit)
    length = guarded(fn, lambda: len(source), bench.limit).result
    args = bench.args.with_values(load=bench.args.save)
    again = guarded(fn, lambda: fn(args), bench.limit).result
    if files:
        guarded(fn, lambda: source.save(0), bench.limit)
        guarded(fn, lambda: again.load(0), bench.limit)
    else:
        state = Path(bench.args.save or ".") / "source.pt"
        guarded(fn, lambda: write_state(state, source.state_dict()), bench.limit)
        guarded(fn, lambda: again.load_state_dict(read_state(state)), bench.limit)
    return f"returns groups of {len(groups[0])}, has {length} prompts per epoch, saves and loads"


def sample_filter(bench: Bench, fn: Hook) -> str:
    groups = bench.answered()
    result = guarded(fn, lambda: fn(bench.args, groups), bench.limit).result
    if result is not None:
        bench.notes.append(f"its return value ({type(result).__name__}) is ignored: set sample.remove_sample = True")
    removed = [sample for sample in flatten(groups) if sample.remove_sample]
    if len(removed) == len(flatten(groups)):
        bench.notes.append("it removes all samples, so nothing would be trained on")
    return f"removes {len(removed)} of {len(flatten(groups))} samples"


def all_samples(bench: Bench, fn: Hook) -> str:
    groups = bench.answered()
    guarded(fn, lambda: fn(bench.args, groups, bench.source), bench.limit)
    return f"called with {len(groups)} groups"


def convert(bench: Bench, fn: Hook) -> str:
    """Test ``fn(args, samples)`` with the converter and the split over ranks, as in a run."""
    from slime.data.convert import samples_to_train_data, split_train_data

    groups = bench.answered()
    data = guarded(fn, lambda: samples_to_train_data(bench.args, groups), bench.limit).result
    args = one_step(bench.args, data)
    guarded(fn, lambda: split_train_data(args, data, 1), bench.limit)
    return f"{len(data['tokens'])} samples with {', '.join(sorted(data))}"


def rollout_log(bench: Bench, fn: Hook) -> str:
    samples = flatten(bench.answered())
    result = guarded(fn, lambda: fn(0, bench.args, samples, {}, 1.0), bench.limit).result
    return "replaces the usual metrics" if result else "adds to the usual metrics"


def eval_log(bench: Bench, fn: Hook) -> str:
    samples = flatten(bench.answered())
    part = {"rewards": [1.0] * len(samples), "truncated": [sample.truncated for sample in samples], "samples": samples}
    result = guarded(fn, lambda: fn(0, bench.args, {"set": part}, {}), bench.limit).result
    return "replaces the usual metrics" if result else "adds to the usual metrics"


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
    "eval_function_path": partial(rollout, evaluation=True),
}
"""The probes by name of the argument. The order matters: later probes use the samples of the generate function."""
