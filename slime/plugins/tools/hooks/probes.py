"""Probes of the hooks of a rollout and of the trainer. A probe calls a hook as a run does, with few
samples.

It returns a short description of the result, or raises :class:`Complaint`. It adds a note to
``bench.notes`` if the hook works but may have an unexpected effect. Probes of generation and rewards are
in a separate file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.algorithms.sequences import IDENTITY
from slime.data.plain_values import read_state, write_state
from slime.data.sample import Sample, flatten
from slime.data.source import has_files, is_stateful

from .bench import Bench, one_step
from .guard import Hook, check_signature, guarded, not_async, wrong
from .probes_generate import (
    agent,
    check_groups,
    generate,
    reward,
    reward_post_process,
    rollout,
    sample_hook,
)

if TYPE_CHECKING:
    from slime.data.fields import RankBatch

Probe = Callable[[Bench, Hook], str]
PAIR = 2


def dynamic_filter(bench: Bench, fn: Hook) -> str:
    from slime.rollout.filter_hub.base_types import call_dynamic_filter

    not_async(fn)
    group = bench.answered()[0]
    check_signature(fn, "fn(args, group)", bench.args, group)
    # Groups with different rewards, and with the same ones, of which many filters drop one kind.
    answers = []
    for name, value in {"mixed": None, "all 0": 0.0, "all 1": 1.0}.items():
        tried = copy.deepcopy(group)
        if value is not None:
            for sample in flatten(tried):
                sample.reward = bench.reward(value)
        kept = guarded(fn, partial(call_dynamic_filter, fn, bench.args, tried), bench.limit).result
        answers.append(f"{name}: {'kept' if kept.keep else 'dropped'}")
    if all(answer.endswith("dropped") for answer in answers):
        bench.notes.append(
            "it drops all tested groups; a rollout without any group fails after --phase-timeout"
        )
    return ", ".join(answers)


def buffer_filter(bench: Bench, fn: Hook) -> str:
    groups = [*bench.answered(), *bench.answered()]
    buffer = list(groups)
    chosen = bench.call(fn, bench.args, None, buffer, 2)
    # It must choose whole groups of the buffer, and each of them once.
    if not isinstance(chosen, list) or any(isinstance(group, Sample) for group in chosen):
        raise wrong(
            fn, f"its result has the type {type(chosen).__name__}, but must be a list of groups"
        )
    if len(chosen) > 2 or len({id(group) for group in chosen}) != len(chosen):
        raise wrong(
            fn, f"asked for 2 groups, it returned {len(chosen)} groups, or one of them twice"
        )
    if any(group is kept for group in chosen for kept in buffer):
        bench.notes.append(
            "it does not remove the returned groups from the buffer; slime does this, but others "
            "do not"
        )
    return f"chose {len(chosen)} of {len(groups)} groups, {len(buffer)} remain"


def data_source(bench: Bench, fn: Hook) -> str:
    """Test a class with ``get_samples, add_samples, __len__`` and the methods that save and restore
    its state.
    """
    # What a class needs to be a data source, before it is called.
    missing = [name for name in ("get_samples", "add_samples", "__len__") if not hasattr(fn, name)]
    if missing:
        raise wrong(fn, f"the class has no {', '.join(missing)}")
    stateful = is_stateful(fn)
    files = has_files(fn)
    if not stateful and not files:
        raise wrong(
            fn,
            "the class has neither state_dict and load_state_dict nor save and load, so it "
            "cannot resume",
        )
    source = bench.call(fn, bench.args)
    groups = bench.call(source.get_samples, PAIR)
    check_groups(fn, groups, bench.args.n_samples_per_prompt)
    if len(groups) != PAIR:
        raise wrong(source.get_samples, f"get_samples({PAIR}) returned {len(groups)} groups")
    bench.call(source.add_samples, groups)
    length = bench.call(source.__len__)
    # A resume makes a new object, which takes the state of the old one.
    args = bench.args.with_values(load=bench.args.save)
    again = bench.call(fn, args)
    if files:
        bench.call(source.save, 0)
        bench.call(again.load, 0)
    else:
        state = Path(bench.args.save or ".") / "source.pt"
        guarded(fn, lambda: write_state(state, source.state_dict()), bench.limit)
        bench.call(again.load_state_dict, read_state(state))
    return f"returns groups of {len(groups[0])}, has {length} prompts per epoch, saves and loads"


def sample_filter(bench: Bench, fn: Hook) -> str:
    groups = bench.answered()
    result = bench.call(fn, bench.args, groups)
    if result is not None:
        bench.notes.append(
            f"its return value ({type(result).__name__}) is ignored: set sample.remove_sample = "
            "True"
        )
    removed = [sample for sample in flatten(groups) if sample.remove_sample]
    if len(removed) == len(flatten(groups)):
        bench.notes.append("it removes all samples, so nothing would be trained on")
    return f"removes {len(removed)} of {len(flatten(groups))} samples"


def all_samples(bench: Bench, fn: Hook) -> str:
    groups = bench.answered()
    bench.call(fn, bench.args, groups, bench.source)
    return f"called with {len(groups)} groups"


def convert(bench: Bench, fn: Hook) -> str:
    """Test ``fn(args, samples)`` with the converter and the split over ranks, as in a run."""
    from slime.data.convert import samples_to_train_data, split_train_data
    from slime.data.schedule import PackingSettings

    groups = bench.answered()
    data = guarded(fn, lambda: samples_to_train_data(bench.args, groups), bench.limit).result
    settings = PackingSettings.from_args(bench.args.with_values(**one_step(data)))
    guarded(fn, lambda: split_train_data(settings, data, 1), bench.limit)
    return f"{len(data['tokens'])} samples with {', '.join(sorted(data))}"


def rollout_log(bench: Bench, fn: Hook) -> str:
    return _logged(bench.call(fn, 0, bench.args, flatten(bench.answered()), {}, 1.0))


def eval_log(bench: Bench, fn: Hook) -> str:
    samples = flatten(bench.answered())
    part = {
        "rewards": [1.0] * len(samples),
        "truncated": [sample.truncated for sample in samples],
        "samples": samples,
    }
    return _logged(bench.call(fn, 0, bench.args, {"set": part}, {}))


def _logged(answer: object) -> str:
    return "replaces the usual metrics" if answer else "adds to the usual metrics"


def _rank_batch(bench: Bench) -> RankBatch:
    """Return the batch of a training rank, with artificial log-probs of all models."""
    import torch

    from slime.data.convert import samples_to_train_data, split_train_data
    from slime.data.fields import to_rank_batch
    from slime.data.schedule import PackingSettings

    # slime's own converter: that of the user has a probe of its own.
    args = bench.args.with_values(custom_convert_samples_to_train_data_path=None)
    data = samples_to_train_data(args, bench.answered())
    settings = PackingSettings.from_args(args.with_values(**one_step(data)))
    batch = to_rank_batch(split_train_data(settings, data, 1)[0])
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> list[torch.Tensor]:
        return [
            low + (high - low) * torch.rand(n, generator=generator)
            for n in batch["response_lengths"]
        ]

    # No model has scored these samples, but every loss needs log-probs.
    batch["log_probs"] = draw(-3, -0.01)
    batch["ref_log_probs"] = draw(-3, -0.01)
    batch["rollout_log_probs"] = [x + 0.01 for x in batch["log_probs"]]
    batch["rollout_id"] = 0
    if args.use_critic:
        batch["values"] = draw(-1, 1)
    return batch


def _check_per_token(fn: Hook, batch: RankBatch, *names: str) -> None:
    for name in names:
        values = batch.get(name)
        if values is None:
            raise wrong(
                fn, f"it must set rollout_data[{name!r}] to one tensor [response_length] per sample"
            )
        lengths = [len(value) for value in values]
        if lengths != list(batch["response_lengths"]):
            raise wrong(
                fn,
                f"{name} has lengths {lengths}, but the responses "
                f"{list(batch['response_lengths'])}",
            )


def advantages(bench: Bench, fn: Hook) -> str:
    from slime.backends.advantages import AdvantageSettings, compute_advantages

    args = bench.args.with_values(compute_advantages_and_returns=True)
    batch = _rank_batch(bench)
    settings = replace(AdvantageSettings.from_args(args), custom=fn)
    guarded(fn, lambda: compute_advantages(settings, batch, IDENTITY), bench.limit)
    _check_per_token(fn, batch, "advantages", "returns")
    return f"advantages and returns of {len(batch['tokens'])} samples"


def postprocess(bench: Bench, fn: Hook) -> str:
    from slime.backends.advantages import AdvantageSettings, compute_advantages

    args = bench.args
    batch = _rank_batch(bench)
    compute_advantages(AdvantageSettings.from_args(args), batch, IDENTITY)
    result = bench.call(fn, args, 0, batch)
    if result is not None:
        bench.notes.append("its return value is ignored: it must modify rollout_data in place")
    if args.compute_advantages_and_returns:
        _check_per_token(fn, batch, "advantages", "returns")
    return "called with " + ", ".join(
        sorted(name for name, value in batch.items() if value is not None)
    )


def loss(bench: Bench, fn: Hook) -> str:
    """Test ``--custom-loss-function-path``: ``fn(args, batch, logits, sum_of_sample_mean)``."""
    return _backward(bench, fn, {"loss_type": "custom_loss"})


def tis(bench: Bench, fn: Hook) -> str:
    """Test ``--custom-tis-function-path``, which is called with keyword arguments only."""
    names = (
        "pg_loss",
        "train_log_probs",
        "rollout_log_probs",
        "loss_masks",
        "total_lengths",
        "response_lengths",
    )
    check_signature(
        fn, f"fn(args=…, {', '.join(f'{n}=…' for n in names)})", args=None, **dict.fromkeys(names)
    )
    return _backward(bench, fn, {"use_tis": True, "loss_type": "policy_loss"})


def reducer(bench: Bench, fn: Hook) -> str:
    check_signature(
        fn,
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)",
        [],
        [],
        [],
        False,
    )
    return _backward(bench, fn, {"loss_type": "policy_loss"})


def _backward(bench: Bench, fn: Hook, settings: dict[str, object]) -> str:
    """Run :func:`slime.backends.loss.compute_loss`, which all backends use, and the backward
    pass.
    """
    import torch

    from slime.backends.advantages import AdvantageSettings, compute_advantages
    from slime.backends.loss import LossSettings, compute_loss
    from slime.backends.loss_inputs import TokenBatch

    not_async(fn)
    args = bench.args.with_values(**settings)
    batch = _rank_batch(bench)
    compute_advantages(AdvantageSettings.from_args(args), batch, IDENTITY)
    # Random logits for the response tokens of the samples, as a model would give them.
    both = zip(batch["tokens"], batch["response_lengths"], strict=True)
    targets = torch.cat([t[len(t) - n :] for t, n in both]).long()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(targets), len(bench.tokenizer), generator=generator).requires_grad_()
    table = torch.log_softmax(logits, -1)
    scores = table.gather(1, targets[:, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1) if args.entropy_coef else None
    count = len(batch["tokens"])
    tokens = TokenBatch.from_rank_batch(
        batch, range(count), log_probs=scores, entropy=entropy, logits=logits, targets=targets
    )
    tokens.values = None

    # The loss of a run with its backward pass, as one micro-batch.
    loss_settings = LossSettings.from_args(args)

    def forward_and_backward() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = compute_loss(
            loss_settings, tokens, num_rollouts=count, num_tokens=float(len(targets))
        )
        if value.dim() != 0:
            raise wrong(fn, f"the loss has the shape {tuple(value.shape)}, but it must be a scalar")
        if not value.requires_grad:
            raise wrong(
                fn, "the loss has no gradient: it was detached, or computed from plain numbers"
            )
        value.backward()
        return value.detach(), metrics

    value, metrics = guarded(fn, forward_and_backward, bench.limit).result
    # What came out of it.
    if not torch.isfinite(value) or logits.grad is None or not torch.isfinite(logits.grad).all():
        raise wrong(fn, f"the loss {float(value):g} or its gradient is not finite")
    if not logits.grad.abs().sum():
        bench.notes.append("the gradient of the loss is 0 for this batch")
    return f"loss {float(value):.4g} with gradient; metrics {', '.join(sorted(metrics))}"


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
    "custom_advantage_function_path": advantages,
    "rollout_data_postprocess_path": postprocess,
    "custom_loss_function_path": loss,
    "custom_tis_function_path": tis,
    "custom_pg_loss_reducer_function_path": reducer,
}
"""The probes by name of the argument. The order matters: later probes use the samples of the
generate function.
"""
