"""Probes of the hooks of the trainer: advantages, losses and corrections, tested with a small batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.algorithms.sequences import IDENTITY
from slime.plugins.tools.hooks.bench import Bench, one_step
from slime.plugins.tools.hooks.guard import Hook, check_signature, guarded, not_async, wrong

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.fields import RankBatch


def _rank_batch(bench: Bench, args: Args) -> RankBatch:
    """Return the batch of a training rank, with artificial log-probs of all models."""
    import torch

    from slime.data.convert import samples_to_train_data, split_train_data
    from slime.data.fields import to_rank_batch

    data = samples_to_train_data(args.with_values(custom_convert_samples_to_train_data_path=None), bench.answered())
    batch = to_rank_batch(split_train_data(one_step(args, data), data, 1)[0])
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> list[torch.Tensor]:
        return [low + (high - low) * torch.rand(n, generator=generator) for n in batch["response_lengths"]]

    batch["old_log_probs"], batch["ref_log_probs"] = draw(-3, -0.01), draw(-3, -0.01)
    batch["rollout_log_probs"] = [x + 0.01 for x in batch["old_log_probs"]]
    batch["rollout_id"] = 0
    if args.use_critic:
        batch["old_values"] = draw(-1, 1)
    return batch


def _check_per_token(fn: Hook, batch: RankBatch, *names: str) -> None:
    for name in names:
        values = batch.get(name)
        if values is None:
            raise wrong(fn, f"it must set rollout_data[{name!r}] to one tensor [response_length] per sample")
        lengths = [len(value) for value in values]
        if lengths != list(batch["response_lengths"]):
            raise wrong(fn, f"{name} has lengths {lengths}, but the responses {list(batch['response_lengths'])}")


def advantages(bench: Bench, fn: Hook) -> str:
    from slime.backends.advantages import AdvantageSettings, compute_advantages
    from slime.data.fields import on_hook_names

    args = bench.args.with_values(compute_advantages_and_returns=True)
    batch = _rank_batch(bench, args)
    settings = replace(AdvantageSettings.from_args(args), custom=on_hook_names(fn))
    guarded(fn, lambda: compute_advantages(settings, batch, IDENTITY), bench.limit)
    _check_per_token(fn, batch, "advantages", "returns")
    return f"advantages and returns of {len(batch['tokens'])} samples"


def postprocess(bench: Bench, fn: Hook) -> str:
    from slime.backends.advantages import AdvantageSettings, compute_advantages

    args = bench.args
    batch = _rank_batch(bench, args)
    compute_advantages(AdvantageSettings.from_args(args), batch, IDENTITY)
    with batch.lent_to("--rollout-data-postprocess-path") as view:
        result = guarded(fn, lambda: fn(args, 0, view), bench.limit).result
    if result is not None:
        bench.notes.append("its return value is ignored: it must modify rollout_data in place")
    _check_per_token(fn, batch, *(name for name in ("advantages", "returns") if args.compute_advantages_and_returns))
    return "called with " + ", ".join(sorted(name for name, value in view.items() if value is not None))


def loss(bench: Bench, fn: Hook) -> str:
    """Test ``--custom-loss-function-path``: ``fn(args, batch, logits, sum_of_sample_mean)``."""
    return _backward(bench, fn, {"loss_type": "custom_loss"})


def tis(bench: Bench, fn: Hook) -> str:
    """Test ``--custom-tis-function-path``, which is called with keyword arguments only."""
    names = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
    check_signature(fn, f"fn(args=…, {', '.join(f'{n}=…' for n in names)})", args=None, **dict.fromkeys(names))
    return _backward(bench, fn, {"use_tis": True, "loss_type": "policy_loss"})


def reducer(bench: Bench, fn: Hook) -> str:
    check_signature(fn, "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)", [], [], [], False)
    return _backward(bench, fn, {"loss_type": "policy_loss"})


def _backward(bench: Bench, fn: Hook, settings: dict[str, object]) -> str:
    """Run :func:`slime.backends.loss.compute_loss`, which all backends use, and the backward pass."""
    import torch

    from slime.backends.advantages import AdvantageSettings, compute_advantages
    from slime.backends.loss import LossSettings, compute_loss
    from slime.backends.loss_inputs import TokenBatch

    not_async(fn)
    args = bench.args.with_values(**settings)
    batch = _rank_batch(bench, args)
    compute_advantages(AdvantageSettings.from_args(args), batch, IDENTITY)
    targets = torch.cat(
        [t[len(t) - n :] for t, n in zip(batch["tokens"], batch["response_lengths"], strict=True)]
    ).long()
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

    loss_settings = LossSettings.from_args(args)

    def both() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = compute_loss(loss_settings, tokens, num_rollouts=count, num_tokens=float(len(targets)))
        if value.dim() != 0:
            raise wrong(fn, f"the loss has the shape {tuple(value.shape)}, but it must be a scalar")
        if not value.requires_grad:
            raise wrong(fn, "the loss has no gradient: it was detached, or computed from plain numbers")
        value.backward()
        return value.detach(), metrics

    value, metrics = guarded(fn, both, bench.limit).result
    if not torch.isfinite(value) or logits.grad is None or not torch.isfinite(logits.grad).all():
        raise wrong(fn, f"the loss {float(value):g} or its gradient is not finite")
    if not logits.grad.abs().sum():
        bench.notes.append("the gradient of the loss is 0 for this batch")
    return f"loss {float(value):.4g} with gradient; metrics {', '.join(sorted(metrics))}"


PROBES: dict[str, Callable[[Bench, Hook], str]] = {
    "custom_advantage_function_path": advantages,
    "rollout_data_postprocess_path": postprocess,
    "custom_loss_function_path": loss,
    "custom_tis_function_path": tis,
    "custom_pg_loss_reducer_function_path": reducer,
}
