"""The shared loss path: against a scalar reference, independent of how a step is split, deaf to
masked tokens.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.sequences import Identity
from slime.backends import advantages, loss
from slime.backends.advantages import AdvantageSettings
from slime.backends.loss import LossSettings, divide_by_weights, is_max_metric, rescale_diagnostics
from slime.backends.loss_inputs import TokenBatch
from slime.config.args import FLAGS, Args
from tests.every_algorithm import ALGORITHMS
from tests.make_args import make_args as resolved_args
from tests.plugins.estimators import scalar_losses

quick = settings(deadline=None, max_examples=40)

PER_TOKEN = (
    "log_probs", "entropy", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns",
    "old_values", "opd_reverse_kl",
)  # fmt: skip


def make_args(**changes: Any) -> Args:
    """The run's own defaults but for the two below; also names of ``--custom-config-path``."""
    own = {name: changes.pop(name) for name in list(changes) if name not in FLAGS}
    args = resolved_args(**(dict(kl_loss_type="k3", rollout_max_response_len=7) | changes))
    for name, value in own.items():
        setattr(args, name, value)
    return args


def compute_loss(args: Args, tokens: TokenBatch, **counts: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return loss.compute_loss(LossSettings.from_args(args), tokens, **counts)


def compute_advantages(args: Args, batch: dict[str, Any], reduce: Identity) -> None:
    advantages.compute_advantages(AdvantageSettings.from_args(args), batch, reduce)


def make_tokens(
    lengths: list[int], seed: int = 0, siblings: int = 1, dtype: torch.dtype = torch.float64
) -> TokenBatch:
    """Random tokens; each run of ``siblings`` samples is one rollout."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def draw(scale: float = 1.0) -> Tensor:
        return (torch.randn(total, generator=generator, dtype=torch.float64) * scale).to(dtype)

    base = -draw().abs() - 0.1
    mask = (torch.rand(total, generator=generator) < 0.7).int()
    sums = torch.tensor([float(m.sum()) for m in mask.split(lengths)])
    rollout_sums = (
        torch.cat([part.sum().repeat(len(part)) for part in sums.split(siblings)])
        if lengths
        else sums
    )
    advantages = torch.cat(
        [torch.randn(1, generator=generator, dtype=torch.float64).repeat(n) for n in lengths]
    )
    return TokenBatch(
        response_lengths=list(lengths),
        total_lengths=[n + 3 for n in lengths],
        loss_mask=mask,
        rollout_mask_sums=rollout_sums,
        log_probs=base.clone().requires_grad_(),
        entropy=draw().abs().requires_grad_(),
        old_log_probs=base + draw(0.3),
        ref_log_probs=base + draw(0.3),
        rollout_log_probs=base + draw(0.3),
        advantages=advantages.to(dtype),
        returns=draw(),
        old_values=draw(),
        opd_reverse_kl=draw(),
    )


def take(tokens: TokenBatch, picked: list[int]) -> TokenBatch:
    """The micro-batch of some samples; gradients flow back to the whole."""
    changes: dict[str, Any] = {}
    for name in ("loss_mask", *PER_TOKEN, "values"):
        value = getattr(tokens, name)
        if value is not None:
            parts = value.split(tokens.response_lengths)
            changes[name] = torch.cat([parts[i] for i in picked])
    return dataclasses.replace(
        tokens,
        response_lengths=[tokens.response_lengths[i] for i in picked],
        total_lengths=[tokens.total_lengths[i] for i in picked],
        rollout_mask_sums=tokens.rollout_mask_sums[picked],
        **changes,
    )


def counts(tokens: TokenBatch, siblings: int = 1) -> dict[str, float]:
    per_sample = [max(float(m.sum()), 1.0) for m in tokens.loss_mask.split(tokens.response_lengths)]
    return {"num_rollouts": len(per_sample) / siblings, "num_tokens": sum(per_sample)}


# --- the formula -------------------------------------------------------------------------------


def reference_policy_loss(a: Args, t: TokenBatch, siblings: int) -> dict[str, Any]:
    """Token by token, straight from contract/algorithms.md 5.3-5.6, on float64 scalars."""
    names = ("loss", "pg_loss", "entropy_loss", "kl_loss", "ppo_kl", "pg_clipfrac", "opsm_clipfrac", "tis",
             "tis_clipfrac", "tis_abs", "ois", "train_rollout_logprob_abs_diff", "opd_reverse_kl")  # fmt: skip
    sums: dict[str, Any] = dict.fromkeys(names, torch.zeros((), dtype=torch.float64))
    high = a.eps_clip if a.eps_clip_high is None else a.eps_clip_high
    position, largest = 0, 0.0
    for i, length in enumerate(t.response_lengths):
        span = range(position, position + length)
        position += length
        inside = [j for j in span if t.loss_mask[j]]
        divisor = 1.0 if a.calculate_per_token_loss else max(float(t.rollout_mask_sums[i]), 1.0)
        old = {
            j: t.rollout_log_probs[j] if a.use_rollout_logprobs else t.old_log_probs[j]
            for j in inside
        }
        kl = {j: old[j] - t.log_probs[j] for j in inside}
        mean_kl = sum(kl.values()) / max(len(inside), 1)
        for j in inside:
            of_sequence = {"gspo": mean_kl, "luspo": mean_kl, "vespo": sum(kl.values())}
            ppo_kl = of_sequence.get(a.advantage_estimator, kl[j])
            ratio, advantage = torch.exp(-ppo_kl), t.advantages[j]
            bounded = torch.clamp(ratio, 1 - a.eps_clip, 1 + high)
            if a.advantage_estimator == "cispo":
                pg, clipped = (
                    -bounded.detach() * advantage * t.log_probs[j],
                    float(bounded != ratio),
                )
            elif a.advantage_estimator in scalar_losses.LOSSES:
                of_token = scalar_losses.LOSSES[a.advantage_estimator]
                pg, clipped = of_token(a, ppo_kl, t.log_probs[j], float(advantage))
            elif a.advantage_estimator in scalar_losses.OF_SEQUENCES:
                of_response = scalar_losses.OF_SEQUENCES[a.advantage_estimator]
                signs = [float(t.advantages[k]) for k in inside]
                pg, clipped = of_response(a, [kl[k] for k in inside], signs, inside.index(j))
            else:
                pg = torch.max(-ratio * advantage, -bounded * advantage)
                clipped = float(-bounded * advantage > -ratio * advantage)
                if a.eps_clip_c is not None and advantage < 0:
                    pg = torch.min(pg, -a.eps_clip_c * advantage)
            dropped = a.use_opsm and advantage < 0 and float(mean_kl.detach()) > a.opsm_delta
            if dropped:
                pg = pg * 0
            gap = float(t.old_log_probs[j] - t.rollout_log_probs[j])
            largest = max(largest, abs(gap))
            weight = math.exp(gap)
            kept = min(max(weight, a.tis_clip_low), a.tis_clip)
            if a.use_tis:
                pg = pg * kept
            d = t.log_probs[j] - t.ref_log_probs[j]
            ref_kl = torch.exp(-d) - 1 + d
            if a.use_unbiased_kl:
                ref_kl = ref_kl * torch.exp(t.log_probs[j] - old[j])
            terms = {
                "pg_loss": pg, "entropy_loss": t.entropy[j], "kl_loss": ref_kl, "ppo_kl": ppo_kl, "ois": ratio,
                "pg_clipfrac": clipped, "opsm_clipfrac": float(dropped), "tis": weight, "tis_abs": abs(weight - 1),
                "tis_clipfrac": float(kept != weight), "train_rollout_logprob_abs_diff": abs(gap),
                "opd_reverse_kl": t.opd_reverse_kl[j],
            }  # fmt: skip
            own_divisor = {"dr_grpo": a.rollout_max_response_len, "luspo": 1}.get(
                a.advantage_estimator
            )
            if own_divisor is not None:  # for the policy loss alone
                terms["pg_loss"] = pg = pg * (divisor / own_divisor)
            terms["loss"] = (
                pg
                - a.entropy_coef * t.entropy[j]
                + (a.kl_loss_coef * ref_kl if a.use_kl_loss else 0)
            )
            for name, x in terms.items():
                sums[name] = sums[name] + x / divisor
    n = counts(t, siblings)
    count = n["num_tokens"] if a.calculate_per_token_loss else n["num_rollouts"]
    return {name: x / count for name, x in sums.items()} | {
        "train_rollout_logprob_abs_diff_max": largest
    }


flags = st.fixed_dictionaries(
    {
        "advantage_estimator": st.sampled_from(sorted(ALGORITHMS)),
        "calculate_per_token_loss": st.booleans(),
        "eps_clip_high": st.sampled_from([None, 0.28]),
        "eps_clip_c": st.sampled_from([None, 3.0]),
        "entropy_coef": st.sampled_from([0.0, 0.1]),
        "use_kl_loss": st.booleans(),
        "kl_loss_coef": st.sampled_from([0.0, 0.3]),
        "use_unbiased_kl": st.booleans(),
        "use_opsm": st.booleans(),
        "off_policy": st.sampled_from(
            [{}, {"use_tis": True, "tis_clip_low": 0.8}, {"use_rollout_logprobs": True}]
        ),
    }
)


@quick
@given(
    flag=flags,
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    fan_out=st.booleans(),
)
def test_policy_loss_metrics_and_gradient(
    flag: dict[str, Any], lengths: list[int], seed: int, fan_out: bool
) -> None:
    off_policy = flag.pop("off_policy")
    args = make_args(**flag, **off_policy)
    siblings = len(lengths) if fan_out else 1
    tokens = make_tokens(lengths, seed, siblings)
    loss, metrics = compute_loss(args, tokens, **counts(tokens, siblings))
    assert tokens.log_probs is not None and tokens.entropy is not None
    leaves = [tokens.log_probs, tokens.entropy]
    got = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    expected = reference_policy_loss(args, tokens, siblings)
    if tokens.loss_mask.any():
        wanted = torch.autograd.grad(
            expected["loss"], leaves, allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    absent = {"kl_loss": not args.use_kl_loss, "opsm_clipfrac": not args.use_opsm}
    absent |= dict.fromkeys(("tis", "tis_clipfrac", "tis_abs"), not args.use_tis)
    for name, value in expected.items():
        if absent.get(name):
            assert name not in metrics
        else:
            wanted_value = value.item() if isinstance(value, Tensor) else value
            assert metrics[name].item() == pytest.approx(wanted_value, rel=1e-9, abs=1e-12), name
    assert loss.dtype == torch.float64 and not any(m.requires_grad for m in metrics.values())


def test_the_loss_of_observations_worked_by_hand() -> None:
    """Tokens that nobody sampled: the mean of their cross-entropy over those of each sample, and
    none of the policy's own.
    """
    tokens = TokenBatch(
        response_lengths=[4, 2],
        total_lengths=[5, 3],
        loss_mask=torch.tensor([1, 0, 0, 0, 1, 0]),
        rollout_mask_sums=torch.tensor([1.0, 1.0]),
        log_probs=torch.tensor([-1.0, -2.0, -3.0, -9.0, -1.0, math.nan], requires_grad=True),
        advantages=torch.tensor([0.5, 7.0, 7.0, 7.0, -1.0, 7.0]),
        observation_masks=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
    )
    args = make_args(observation_loss_coef=0.1)
    loss, metrics = compute_loss(args, tokens, num_rollouts=2, num_tokens=2)
    # pg: (-0.5 + 1)/2 = 0.25   observations: (2 + 3)/2 / 2 samples = 1.25
    assert loss.item() == pytest.approx(0.25 + 0.125)
    assert metrics["observation_loss"].item() == pytest.approx(1.25)
    (gradient,) = torch.autograd.grad(loss, [tokens.log_probs])
    # of the policy -A/2, of an observation -0.1 / 2 tokens / 2 samples
    assert gradient.tolist() == pytest.approx([-0.25, -0.025, -0.025, 0.0, 0.5, 0.0])
    per_token = make_args(observation_loss_coef=0.1, calculate_per_token_loss=True)
    assert compute_loss(per_token, tokens, num_rollouts=2, num_tokens=2)[0].item() == pytest.approx(
        0.25 + 0.1 * 5 / 2
    )
    plain = compute_loss(make_args(), tokens, num_rollouts=2, num_tokens=2)
    assert plain[0].item() == pytest.approx(0.25) and "observation_loss" not in plain[1]


def test_one_step_worked_by_hand() -> None:
    """Two samples, three trained tokens, ratio 1: the loss is the mean over samples of -A, plus 0.1
    k3 - 0.01 H.
    """
    tokens = TokenBatch(
        response_lengths=[2, 2],
        total_lengths=[4, 4],
        loss_mask=torch.tensor([1, 1, 1, 0]),
        rollout_mask_sums=torch.tensor([2.0, 1.0]),
        log_probs=torch.tensor([-1.0, -2.0, -1.0, -7.0], requires_grad=True),
        ref_log_probs=torch.tensor([-1.0 - math.log(2), -2.0, -1.0, 0.0]),
        entropy=torch.tensor([1.0, 3.0, 2.0, 9.0]),
        advantages=torch.tensor([0.5, 0.5, -1.0, 5.0]),
    )
    args = make_args(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
    loss, metrics = compute_loss(args, tokens, num_rollouts=2, num_tokens=3)
    # pg: (-0.5 + 1.0) / 2 = 0.25   k3: (0.193147 + 0) / 2 samples / 2 tokens = 0.0482868   H: (2 + 2) / 2 = 2
    assert metrics["pg_loss"].item() == pytest.approx(0.25)
    assert metrics["kl_loss"].item() == pytest.approx((0.5 - 1 + math.log(2)) / 4)
    assert metrics["entropy_loss"].item() == pytest.approx(2.0)
    assert loss.item() == pytest.approx(0.25 + 0.1 * 0.0482868 - 0.02)
    loss.backward()
    assert tokens.log_probs is not None and tokens.log_probs.grad is not None
    # -A/2 tokens/2 samples, plus 0.1 (1 - e^-d)/4 on the first
    assert tokens.log_probs.grad.tolist() == pytest.approx([-0.125 + 0.0125, -0.125, 0.5, 0.0])
    assert loss.dtype == torch.float32


def test_the_value_loss_of_two_samples_is_the_one_worked_by_hand() -> None:
    tokens = make_tokens([2, 1])
    tokens.loss_mask = torch.ones(3, dtype=torch.int32)
    tokens.values = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
    tokens.old_values = torch.tensor([0.0, 0.4, 2.0], dtype=torch.float64)
    tokens.returns = torch.tensor([2.0, 0.0, 2.5], dtype=torch.float64)
    loss, metrics = compute_loss(
        make_args(loss_type="value_loss", value_clip=0.3), tokens, **counts(tokens)
    )
    # Errors: max((1 - 2)^2, (0.3 - 2)^2) = 2.89; max(0.5^2, 0.5^2) = 0.25; max((3 - 2.5)^2, (2.3 -
    # 2.5)^2) = 0.25.
    assert loss.item() == pytest.approx(((2.89 + 0.25) / 2 + 0.25) / 2)
    assert metrics["value_clipfrac"].item() == pytest.approx(0.25)


# --- splits ------------------------------------------------------------------------------------


@quick
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    seed=st.integers(0, 99),
    per_token=st.booleans(),
    kind=st.sampled_from(["policy_loss", "sft_loss", "value_loss"]),
    data=st.data(),
)
def test_shares_add_up_however_a_step_is_split(
    lengths: list[int], seed: int, per_token: bool, kind: str, data: st.DataObject
) -> None:
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    args = make_args(
        loss_type=kind, calculate_per_token_loss=per_token, advantage_estimator="gspo", entropy_coef=0.1,
        use_kl_loss=True, kl_loss_coef=0.1, use_tis=True, use_opsm=True,
    )  # fmt: skip
    tokens = make_tokens(lengths, seed, siblings=2, dtype=torch.float32)
    if kind == "value_loss":
        assert tokens.log_probs is not None
        tokens.values = tokens.log_probs
    count = counts(tokens, siblings=2)
    assert tokens.log_probs is not None
    whole, whole_metrics = compute_loss(args, tokens, **count)
    (whole_grad,) = torch.autograd.grad(whole, tokens.log_probs)
    parts = [[i for i in range(len(lengths)) if owner[i] == k] for k in range(4)]
    shares = [compute_loss(args, take(tokens, part), **count) for part in parts if part]
    torch.testing.assert_close(
        torch.stack([s for s, _ in shares]).sum(), whole, rtol=1e-5, atol=1e-6
    )
    grad = sum(torch.autograd.grad(s, tokens.log_probs)[0] for s, _ in shares)
    torch.testing.assert_close(grad, whole_grad, rtol=1e-5, atol=1e-7)
    for name, value in whole_metrics.items():
        together = torch.stack([m[name] for _, m in shares])
        together = together.max() if is_max_metric(name) else together.sum()
        torch.testing.assert_close(together, value, rtol=1e-5, atol=1e-6)


def test_batch_normalised_weights_do_not_depend_on_micro_batches_either() -> None:
    """The divisor is the mean weight of the whole rollout, taken with the advantages
    (mis_weight_mean).
    """
    lengths, off_policy = (
        [3, 2, 4],
        dict(use_tis=True, tis_level="geometric", tis_batch_normalize=True),
    )
    args = make_args(
        **off_policy, custom_tis_function_path="slime.algorithms.mis.compute_mis_weights", kl_coef=0.0, use_opd=False,
        normalize_advantages=False, compute_advantages_and_returns=True, custom_advantage_function_path=None,
    )  # fmt: skip
    tokens = make_tokens(lengths, seed=4)
    batch: dict[str, Any] = {
        "response_lengths": lengths,
        "total_lengths": tokens.total_lengths,
        "tokens": [[0] * n for n in tokens.total_lengths],
        "rewards": [1.0, -1.0, 0.5],
        "rollout_mask_sums": tokens.rollout_mask_sums.tolist(),
        "loss_masks": tokens.split(tokens.loss_mask),
        "log_probs": tokens.split(tokens.old_log_probs),  # type: ignore[arg-type]
        "rollout_log_probs": tokens.split(tokens.rollout_log_probs),  # type: ignore[arg-type]
    }
    compute_advantages(args, batch, Identity())
    assert tokens.log_probs is not None
    current = tokens.log_probs.split(lengths)

    def share(picked: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        part = TokenBatch.from_rank_batch(
            batch, picked, log_probs=torch.cat([current[i] for i in picked])
        )
        return compute_loss(args, part, num_rollouts=3, num_tokens=1)

    whole, _ = share([0, 1, 2])
    assert sum(share([i])[0].item() for i in range(3)) == pytest.approx(whole.item())
    args.calculate_per_token_loss = True
    per_token = compute_loss(
        args,
        TokenBatch.from_rank_batch(batch, [0, 1, 2], log_probs=tokens.log_probs),
        num_rollouts=3,
        num_tokens=float(tokens.loss_mask.sum()),
    )[1]
    # the mean weight after normalisation
    assert per_token["mis_weight"].item() == pytest.approx(1.0)


class ThreadSum:
    """over_sequence for ranks that are threads: forward sums the shares, backward sums the
    gradients.
    """

    def __init__(self, ranks: int) -> None:
        self.barrier, self.shared, self.local = (
            threading.Barrier(ranks, timeout=120),
            [None] * ranks,
            threading.local(),
        )

    def total(self, x: Tensor) -> Tensor:
        self.shared[self.local.rank] = x
        self.barrier.wait()
        total = sum(self.shared)
        self.barrier.wait()
        return total

    def over_data(self, x: Tensor) -> Tensor:
        raise AssertionError("a micro-batch must not wait for other data-parallel ranks")

    def over_sequence(self, x: Tensor) -> Tensor:
        outer = self

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return outer.total(x)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return outer.total(grad)

        return Sum.apply(x)


@settings(deadline=None, max_examples=25)
@given(
    estimator=st.sampled_from(sorted(ALGORITHMS)),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["truncate", "clip", "mask"]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    ranks=st.integers(2, 3),
    seed=st.integers(0, 99),
)
def test_a_context_parallel_group_agrees_with_one_rank(
    estimator: str, level: str, mode: str, lengths: list[int], ranks: int, seed: int
) -> None:
    """Every token on a rank of its own choice; a rank may hold none of a response, or nothing at
    all.
    """
    args = make_args(
        advantage_estimator=estimator, use_opsm=True, opsm_delta=0.0, use_tis=True, tis_level=level, tis_mode=mode,
        rs_veto_threshold=0.4, custom_tis_function_path="slime.algorithms.mis.compute_mis_weights",
    )  # fmt: skip
    tokens = make_tokens(lengths, seed)
    count = counts(tokens)
    assert tokens.log_probs is not None
    whole, whole_metrics = compute_loss(args, tokens, **count)
    (expected,) = torch.autograd.grad(whole, tokens.log_probs)
    owner = torch.randint(ranks, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    reduce = ThreadSum(ranks)
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        reduce.local.rank = rank
        mine = owner == rank
        changes = {name: getattr(tokens, name).detach()[mine] for name in ("loss_mask", *PER_TOKEN)}
        changes["log_probs"].requires_grad_()
        shares = [int(part.sum()) for part in mine.split(lengths)]
        part = dataclasses.replace(tokens, response_lengths=shares, **changes)
        loss, metrics = compute_loss(args, part, **count, reduce=reduce)
        loss.backward()
        results[rank] = (loss.detach(), metrics, mine, part.log_probs.grad)  # type: ignore[union-attr]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert all(results)
    torch.testing.assert_close(torch.stack([loss for loss, *_ in results]).sum(), whole.detach())
    for _, _, mine, grad in results:
        torch.testing.assert_close(grad, expected[mine])
    for name in ("pg_clipfrac", "opsm_clipfrac", "mis_rejected_frac", "mis_train_ppl", "ppo_kl"):
        torch.testing.assert_close(
            torch.stack([m[name] for _, m, *_ in results]).sum(), whole_metrics[name]
        )


# --- what must not matter ----------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("kind", ["policy_loss", "sft_loss", "value_loss"])
def test_masked_tokens_reach_neither_loss_nor_gradient(kind: str, poison: float) -> None:
    args = make_args(
        loss_type=kind,
        entropy_coef=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        use_tis=True,
        use_opsm=True,
        use_unbiased_kl=True,
    )
    clean = make_tokens([4, 3], seed=1)
    off = clean.loss_mask == 0
    assert off.any()
    changes = {
        name: torch.where(
            off, torch.full_like(getattr(clean, name), poison), getattr(clean, name)
        ).detach()
        for name in PER_TOKEN
    }
    for name in ("log_probs", "entropy"):
        changes[name].requires_grad_()
    dirty = dataclasses.replace(clean, **changes)
    if kind == "value_loss":
        clean.values, dirty.values = clean.log_probs, dirty.log_probs
    losses = [compute_loss(args, t, **counts(t)) for t in (clean, dirty)]
    assert losses[0][0].item() == losses[1][0].item()
    assert {k: v.item() for k, v in losses[0][1].items()} == {
        k: v.item() for k, v in losses[1][1].items()
    }
    grads = [
        torch.autograd.grad(loss, t.log_probs)[0]
        for (loss, _), t in zip(losses, (clean, dirty), strict=True)
    ]
    assert torch.equal(*grads) and grads[0][off].abs().sum() == 0


def test_nothing_unmasked_is_zero_and_still_has_a_gradient_path() -> None:
    tokens = make_tokens([3, 2])
    tokens.loss_mask = torch.zeros(5, dtype=torch.int32)
    tokens.rollout_mask_sums = torch.zeros(2)
    loss, metrics = compute_loss(make_args(use_tis=True), tokens, num_rollouts=2, num_tokens=2)
    assert tokens.log_probs is not None
    (grad,) = torch.autograd.grad(loss, tokens.log_probs)
    assert loss.item() == 0 and grad.abs().sum() == 0
    assert all(v.item() == 0 for v in metrics.values())


def test_reused_log_probs_give_ratio_one_and_the_plain_policy_gradient() -> None:
    tokens = make_tokens([4, 3], seed=5)
    tokens.old_log_probs = None
    loss, metrics = compute_loss(make_args(), tokens, **counts(tokens))
    assert tokens.log_probs is not None and tokens.advantages is not None
    (grad,) = torch.autograd.grad(loss, tokens.log_probs)
    weights = torch.cat([m / max(float(m.sum()), 1) / 2 for m in tokens.loss_mask.split([4, 3])])
    torch.testing.assert_close(grad, -tokens.advantages * weights, check_dtype=False)
    assert metrics["ppo_kl"].item() == 0 and metrics["pg_clipfrac"].item() == 0
    difference = tokens.log_probs.detach() - tokens.rollout_log_probs  # type: ignore[operator]
    expected = float((difference.abs() * weights).sum())
    # measured all the same
    assert metrics["train_rollout_logprob_abs_diff"].item() == pytest.approx(expected)
    k3 = float(((difference.exp() - 1 - difference) * weights).sum())  # of KL(engine ‖ trainer)
    assert metrics["train_rollout_k3"].item() == pytest.approx(k3)


def test_zero_advantages_have_exactly_zero_gradient_so_those_groups_can_be_left_out() -> None:
    tokens = make_tokens([4, 3, 2], seed=5)
    tokens.advantages = torch.cat([tokens.advantages[:4], torch.zeros(5)])  # type: ignore[index]
    args = make_args(
        use_tis=True, use_opsm=True, eps_clip_c=3.0, use_kl_loss=True, kl_loss_coef=0.0
    )
    count = counts(tokens)
    assert tokens.log_probs is not None
    loss, metrics = compute_loss(args, tokens, **count)
    (grad,) = torch.autograd.grad(loss, tokens.log_probs)
    assert grad[4:].abs().max() == 0
    left, left_metrics = compute_loss(args, take(tokens, [0]), **count)
    assert left.item() == loss.item() and left_metrics["pg_clipfrac"] == metrics["pg_clipfrac"]
    scaled = rescale_diagnostics({k: v.item() for k, v in left_metrics.items()}, 1 / 3)
    alone = compute_loss(args, take(tokens, [0]), num_rollouts=1, num_tokens=4)[1]
    for name in (
        "ppo_kl",
        "train_rollout_logprob_abs_diff",
        "train_rollout_logprob_abs_diff_max",
        "tis",
        "kl_loss",
    ):
        assert scaled[name] == pytest.approx(alone[name].item()), name
    assert scaled["pg_loss"] == left_metrics["pg_loss"].item()


def test_half_precision_log_probs_are_computed_in_float32() -> None:
    tokens = make_tokens([4], dtype=torch.bfloat16)
    loss, metrics = compute_loss(make_args(), tokens, **counts(tokens))
    assert loss.dtype == torch.float32 and all(m.dtype == torch.float32 for m in metrics.values())


# --- hooks -------------------------------------------------------------------------------------

HOOKS = """
import torch

def tis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    assert [len(x) for x in train_log_probs] == [len(x) for x in loss_masks] == response_lengths
    masks = [m.clone() for m in loss_masks]
    masks[0][:] = 0                       # reject the first sample
    return pg_loss * 2, masks, {"seen": torch.ones_like(pg_loss)}

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    mask = torch.cat(loss_masks)
    return lambda x: (x * mask).sum() / 100

def loss(args, batch, logits, sum_of_sample_mean):
    log_probs = logits.log_softmax(-1).gather(-1, batch["targets"][:, None])[:, 0]
    assert batch["unconcat_tokens"] == batch["tokens"] and len(batch["rewards"]) == len(batch["response_lengths"])
    assert batch["metadata"] == [{"row": 1}, {"row": 2}]
    nll = sum_of_sample_mean(-log_probs)
    return nll, {"nll": nll, "worst_max": (-log_probs).max()}
"""


@pytest.fixture
def hooks(tmp_path: Any) -> str:
    path = tmp_path / "my_hooks.py"
    path.write_text(HOOKS)
    return str(path)


def test_rejected_tokens_leave_the_numerator_only(hooks: str) -> None:
    tokens = make_tokens([4, 3], seed=2)
    args = make_args(use_tis=True, custom_tis_function_path=f"{hooks}:tis")
    _, metrics = compute_loss(args, tokens, **counts(tokens))
    _, second = compute_loss(make_args(), take(tokens, [1]), **counts(tokens))
    assert metrics["pg_loss"].item() == pytest.approx(2 * second["pg_loss"].item())
    assert metrics["seen"].item() == pytest.approx(1.0)  # metrics keep the mask from before


def test_mismatch_metrics_alone_change_nothing(hooks: str) -> None:
    tokens = make_tokens([4, 3], seed=2)
    plain, _ = compute_loss(make_args(), tokens, **counts(tokens))
    args = make_args(get_mismatch_metrics=True, custom_tis_function_path=f"{hooks}:tis")
    measured, metrics = compute_loss(args, tokens, **counts(tokens))
    assert measured.item() == plain.item() and "seen" in metrics


def test_custom_pg_reducer_replaces_the_reduction_of_pg_loss_only(hooks: str) -> None:
    tokens = make_tokens([4, 3], seed=2)
    args = make_args(
        custom_pg_loss_reducer_function_path=f"{hooks}:reducer",
        entropy_coef=0.1,
        calculate_per_token_loss=True,
    )
    loss, metrics = compute_loss(args, tokens, num_rollouts=2, num_tokens=5)
    summed = compute_loss(
        make_args(calculate_per_token_loss=True), tokens, num_rollouts=2, num_tokens=5
    )[1]
    assert metrics["pg_loss"].item() == pytest.approx(summed["pg_loss"].item() / 100)
    assert metrics["entropy_loss"].item() == pytest.approx(summed["entropy_loss"].item())
    assert loss.item() == pytest.approx(
        metrics["pg_loss"].item() - 0.1 * metrics["entropy_loss"].item()
    )


@pytest.mark.parametrize("divisor", [None, 50])
@pytest.mark.parametrize(
    "flag",
    [
        {"advantage_estimator": "dr_grpo"},
        {"custom_pg_loss_reducer_function_path": "slime.algorithms.dr_grpo.pg_loss_reducer"},
    ],
    ids=["estimator", "reducer alone"],
)
def test_dr_grpo_divides_every_response_by_the_same_constant(
    flag: dict[str, str], divisor: int | None
) -> None:
    tokens = make_tokens([4, 3], seed=2)
    args = make_args(**flag, rollout_max_response_len=20)
    if divisor:
        args.dr_grpo_divisor = divisor
    tokens.old_log_probs = None
    loss, _ = compute_loss(args, tokens, **counts(tokens))
    assert tokens.advantages is not None
    expected = -(tokens.advantages * tokens.loss_mask).sum() / (divisor or 20) / 2
    assert loss.item() == pytest.approx(expected.item())


def test_custom_loss_gets_logits_batch_and_reduction(hooks: str) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    batch = {
        "tokens": [[1, 2, 3, 4], [5, 6, 0]],
        "rewards": [1.0, 0.0],
        "total_lengths": [4, 3],
        "response_lengths": [3, 2],
        "loss_masks": [torch.tensor([1, 1, 0]), torch.tensor([1, 1])],
        # the rollout of the second sample has another one elsewhere
        "rollout_mask_sums": [2.0, 4.0],
        "train_metadata": [{"row": 1}, {"row": 2}],
        "micro_batch_indices": [[0], [1]],
        "global_batch_sizes": [2],
    }
    targets = torch.tensor([2, 3, 4, 6, 0])
    tokens = TokenBatch.from_rank_batch(batch, [0, 1], logits=logits, targets=targets)
    assert "micro_batch_indices" not in tokens.sample_entries
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{hooks}:loss")
    loss, metrics = compute_loss(args, tokens, num_rollouts=2, num_tokens=4)
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none").detach()
    expected = ((nll[[0, 1]].sum() / 2 + nll[[3, 4]].sum() / 4) / 2).item()
    assert loss.item() == metrics["nll"].item() == pytest.approx(expected)
    assert metrics["worst_max"].item() == pytest.approx(nll.max().item())
    loss.backward()
    assert logits.grad is not None and logits.grad[2].abs().sum() == 0


def test_metrics_of_a_custom_loss_are_numbers_on_its_device(tmp_path: Path) -> None:
    """Also floats, and tensors on the CPU: on a GPU they could otherwise not be copied to the host
    together.
    """
    hook = tmp_path / "numbers.py"
    hook.write_text(
        "def loss(args, batch, logits, mean):\n    return logits.sum(), {'one': 0.5}\n\n\n"
        "def long(args, batch, logits, mean):\n    return logits.sum(), {'one': logits[:, 0]}\n\n\n"
        "def alone(args, batch, logits, mean):\n    return logits.sum()\n\n\n"
        "def rows(args, batch, logits, mean):\n    return logits.sum(-1), {}\n"
    )
    tokens = TokenBatch(
        [2],
        [3],
        torch.ones(2, device="meta"),
        torch.ones(1),
        logits=torch.ones(2, 5, device="meta"),
    )
    loss, metrics = compute_loss(custom_loss(f"{hook}:loss"), tokens, num_rollouts=1, num_tokens=2)
    assert {x.device for x in [loss, *metrics.values()]} == {torch.device("meta")}
    with pytest.raises(ValueError, match=r"'one'.*\(2,\).*sum_of_sample_mean"):
        compute_loss(custom_loss(f"{hook}:long"), tokens, num_rollouts=1, num_tokens=2)
    for name in ("alone", "rows"):
        with pytest.raises(ValueError, match="--custom-loss-function-path must return"):
            compute_loss(custom_loss(f"{hook}:{name}"), tokens, num_rollouts=1, num_tokens=2)


def test_a_custom_loss_that_reads_an_unknown_entry_is_told_those_that_there_are(
    tmp_path: Path,
) -> None:
    hook = tmp_path / "typo.py"
    hook.write_text("def loss(args, batch, logits, mean):\n    return batch['advantage'], {}\n")
    tokens = dataclasses.replace(make_tokens([2]), logits=torch.ones(2, 5))
    with pytest.raises(KeyError, match=r"no 'advantage'.*current_log_probs.*loss_mask.*targets"):
        compute_loss(custom_loss(f"{hook}:loss"), tokens, num_rollouts=1, num_tokens=2)


def custom_loss(path: str) -> Any:
    return make_args(loss_type="custom_loss", custom_loss_function_path=path)


CONTEXT_PARALLEL_LOSS = """
import torch

def loss(args, batch, logits, sum_of_sample_mean):
    log_probs = batch["current_log_probs"]
    assert [len(x) for x in log_probs.split(batch["response_lengths"])] == [len(x) for x in batch["advantages"]]
    assert torch.equal(torch.cat(batch["loss_masks"]), batch["loss_mask"])
    return sum_of_sample_mean(-log_probs * torch.cat(batch["advantages"])), {}
"""


def test_a_custom_loss_sees_its_ranks_share_and_the_shares_add_up(tmp_path: Path) -> None:
    hook = tmp_path / "shares.py"
    hook.write_text(CONTEXT_PARALLEL_LOSS)
    whole = make_tokens([4, 3], seed=3)
    assert whole.advantages is not None and whole.log_probs is not None
    batch = {
        "tokens": [torch.arange(6), torch.arange(5)],
        "total_lengths": [6, 5],
        "response_lengths": [4, 3],
        "loss_masks": list(whole.loss_mask.split([4, 3])),
        "advantages": list(whole.advantages.split([4, 3])),
        "rollout_mask_sums": whole.rollout_mask_sums.tolist(),
    }
    args = make_args(loss_type="custom_loss", custom_loss_function_path=str(hook))

    def share(*own: list[int]) -> float:
        rows = torch.tensor([*own[0], *(4 + i for i in own[1])])
        scores = whole.log_probs.detach()[rows]  # type: ignore[union-attr]
        tokens = TokenBatch.from_rank_batch(
            batch,
            [0, 1],
            log_probs=scores,
            logits=scores[:, None],
            response_index=[torch.tensor(x) for x in own],
        )
        return compute_loss(args, tokens, **counts(whole))[0].item()

    assert share([0, 3], [1]) + share([1, 2], [0, 2]) == pytest.approx(
        share([0, 1, 2, 3], [0, 1, 2])
    )


# --- the batch ---------------------------------------------------------------------------------


def test_from_rank_batch_picks_and_flattens_in_the_given_order() -> None:
    lengths = [3, 1, 2]
    batch: dict[str, Any] = {
        "tokens": [torch.arange(n + 2) for n in lengths],
        "total_lengths": [n + 2 for n in lengths],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
        "rollout_mask_sums": [3.0, 3.0, 3.0],
        "log_probs": [torch.full((n,), float(i)) for i, n in enumerate(lengths)],
        "values": [torch.full((n,), 10.0 + i) for i, n in enumerate(lengths)],
        "mis_weight_mean": 0.5,
    }
    tokens = TokenBatch.from_rank_batch(batch, [2, 0], log_probs=torch.zeros(5))
    assert tokens.response_lengths == [2, 3] and tokens.total_lengths == [4, 5]
    assert tokens.old_log_probs is not None and tokens.old_log_probs.tolist() == [2, 2, 0, 0, 0]
    assert tokens.old_values is not None and tokens.old_values.tolist() == [12, 12, 10, 10, 10]
    assert tokens.values is None and tokens.ref_log_probs is None and tokens.mis_weight_mean == 0.5
    assert tokens.sample_entries["response_lengths"] == [2, 3]


@pytest.mark.parametrize(
    ("changes", "without", "message"),
    [
        (dict(use_kl_loss=True), "ref_log_probs", "--use-kl-loss needs ref_log_probs"),
        (dict(use_tis=True), "rollout_log_probs", "--use-tis"),
        (dict(entropy_coef=0.1), "entropy", "--entropy-coef 0.1"),
        ({}, "advantages", "needs advantages"),
        (dict(advantage_estimator="grop"), "returns", "'grop'.*grpo"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(changes: dict[str, Any], without: str, message: str) -> None:
    tokens = dataclasses.replace(make_tokens([2]), **{without: None})
    with pytest.raises(ValueError, match=message):
        compute_loss(make_args(**changes), tokens, num_rollouts=1, num_tokens=2)


def test_a_tensor_of_another_length_is_named() -> None:
    tokens = dataclasses.replace(make_tokens([2, 2]), ref_log_probs=torch.zeros(3))
    with pytest.raises(ValueError, match=r"ref_log_probs has shape \(3,\).*\(4,\)"):
        compute_loss(make_args(), tokens, num_rollouts=2, num_tokens=4)


def test_identity_is_the_default_reduce() -> None:
    tokens = make_tokens([3, 2])
    args = make_args(advantage_estimator="gspo")
    same = [
        compute_loss(args, tokens, **counts(tokens), **kw)[0].item()
        for kw in ({}, {"reduce": Identity()})
    ]
    assert same[0] == same[1]


# --- by the age of the weights -----------------------------------------------------------------


@quick
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    per_token=st.booleans(),
    data=st.data(),
)
def test_the_log_prob_gap_of_each_age_is_its_tokens_mean(
    lengths: list[int], seed: int, per_token: bool, data: st.DataObject
) -> None:
    """Whatever the micro-batches: shares summed, then divided, weigh each token as the gap over all
    tokens does.
    """
    args, tokens = make_args(calculate_per_token_loss=per_token), make_tokens(lengths, seed)
    ages = st.lists(st.sampled_from([-1, 0, 1, 2, 5]), min_size=sum(lengths), max_size=sum(lengths))
    age = torch.tensor(data.draw(ages), dtype=torch.float32)
    parts = [
        dataclasses.replace(part, staleness=own)
        for part, own in zip(*split_samples(tokens, age), strict=True)
    ]
    total: dict[str, float] = {}
    for part in parts:
        _, metrics = compute_loss(args, part, **counts(tokens, 1))
        for name, value in metrics.items():
            total[name] = total.get(name, 0.0) + float(value)
    got = divide_by_weights(total)
    assert tokens.old_log_probs is not None and tokens.rollout_log_probs is not None
    gap = (tokens.old_log_probs - tokens.rollout_log_probs).abs().double()
    lone = torch.cat(
        [
            (m / (1.0 if per_token else max(float(m.sum()), 1.0)))
            for m in tokens.loss_mask.split(lengths)
        ]
    )
    for name, chosen in (("0", age == 0), ("1", age == 1), ("2+", age >= 2)):
        weight = (lone * chosen).sum()
        if weight:
            assert got[f"logprob_gap_staleness_{name}"] == pytest.approx(
                float((gap * lone * chosen).sum() / weight)
            )
        else:
            assert f"logprob_gap_staleness_{name}" not in got
    assert not [name for name in got if name.endswith("/weight")]


def split_samples(tokens: TokenBatch, age: Tensor) -> tuple[list[TokenBatch], list[Tensor]]:
    """Each sample as a micro-batch of its own, and its ages."""
    rows = {
        name: getattr(tokens, name).detach().split(tokens.response_lengths)
        for name in (
            "loss_mask",
            "log_probs",
            "old_log_probs",
            "rollout_log_probs",
            "advantages",
            "entropy",
        )
    }
    sums = tokens.rollout_mask_sums
    parts = [
        TokenBatch(
            [n],
            [n + 3],
            rollout_mask_sums=sums[i : i + 1],
            **{name: of[i] for name, of in rows.items()},
        )
        for i, n in enumerate(tokens.response_lengths)
    ]
    return parts, list(age.split(tokens.response_lengths))


def test_a_correction_by_default_leaves_samples_without_engine_log_probs_alone() -> None:
    tokens = dataclasses.replace(make_tokens([3, 2]), rollout_log_probs=None)
    plain, _ = compute_loss(make_args(), tokens, num_rollouts=2, num_tokens=5)
    loss, metrics = compute_loss(
        make_args(use_tis=True, explicit=frozenset()), tokens, num_rollouts=2, num_tokens=5
    )
    assert loss == plain and "tis_clipfrac" not in metrics
    with pytest.raises(ValueError, match="--use-tis"):
        compute_loss(
            make_args(use_tis=True, explicit={"use_tis"}), tokens, num_rollouts=2, num_tokens=5
        )
