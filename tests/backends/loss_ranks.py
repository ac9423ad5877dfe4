"""What the four ranks of ``test_loss_ranks.py`` run: two data-parallel by two context-parallel."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.sequences import Identity
from slime.backends.advantages import AdvantageSettings, compute_advantages
from slime.backends.collectives import DataParallelReduce
from slime.backends.loss import LossSettings, compute_loss, is_max_metric
from slime.backends.loss_inputs import TokenBatch
from slime.config.args import Args
from tests.every_algorithm import ALGORITHMS

LENGTHS = [5, 1, 4, 6, 2, 3]
FIELDS = ("log_probs", "entropy", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns",
          "old_values")  # fmt: skip
MIS: dict[str, Any] = dict(
    use_tis=True, custom_tis_function_path="slime.algorithms.mis.compute_mis_weights"
)

LOSS_CASES: dict[str, dict[str, Any]] = (
    {f"{name}, {per}": dict(advantage_estimator=name, calculate_per_token_loss=per == "per token")
     for name in ALGORITHMS for per in ("per rollout", "per token")}
    | {f"mis {level} {mode}": dict(tis_level=level, tis_mode=mode, rs_veto_threshold=0.4, **MIS)
       for level, mode in product(("token", "sequence", "geometric"), ("truncate", "clip", "mask"))}
    | {
        "opsm": dict(use_opsm=True, opsm_delta=0.0),
        "kl and entropy": dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.1),
        "unbiased kl": dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_unbiased_kl=True),
        "icepop": dict(use_tis=True, tis_clip_low=0.5,
                       custom_tis_function_path="slime.algorithms.off_policy.icepop_function"),
        "sft": dict(loss_type="sft_loss"),
        "value": dict(values=True),
    }
)  # fmt: skip
ADVANTAGE_CASES: dict[str, dict[str, Any]] = {
    **{name: dict(advantage_estimator=name, kl_coef=0.1, gamma=0.9, lambd=0.8, normalize_advantages=True)
       for name in ALGORITHMS},
    "distillation": dict(use_opd=True, opd_kl_coef=0.5, normalize_advantages=True),
    "mean of weights": dict(tis_level="geometric", tis_batch_normalize=True, **MIS),
}  # fmt: skip


def run_args(changes: dict[str, Any]) -> Args:
    args = Args()
    defaults = {"eps_clip_high": 0.28, "rollout_max_response_len": 8, "kl_loss_type": "k1"}
    for name, value in (defaults | changes).items():
        setattr(args, name, value)
    return args


def everything() -> dict[str, Any]:
    """All per-token numbers of the whole batch, float64, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    total = sum(LENGTHS)
    base = -torch.rand(total, generator=generator, dtype=torch.float64) * 2 - 0.1
    data: dict[str, Any] = {
        name: base + torch.randn(total, generator=generator, dtype=torch.float64) * 0.4
        for name in FIELDS
    }
    data["log_probs"] = base
    data["loss_mask"] = (torch.rand(total, generator=generator) < 0.8).int()
    return data


def token_batch(data: dict[str, Any], keep: Tensor, samples: list[int], values: bool) -> TokenBatch:
    """The tokens of ``keep`` in the given samples, with a leaf that takes gradient."""
    parts = {name: x.split(LENGTHS) for name, x in data.items()}
    kept = keep.split(LENGTHS)
    fields = {
        name: torch.cat([part[i][kept[i]] for i in samples]).clone() for name, part in parts.items()
    }
    leaf = fields["log_probs"].requires_grad_()
    sums = torch.tensor([float(parts["loss_mask"][i].sum()) for i in samples])
    return TokenBatch(
        response_lengths=[int(kept[i].sum()) for i in samples],
        total_lengths=[LENGTHS[i] + 2 for i in samples],
        rollout_mask_sums=sums,
        values=leaf if values else None,
        **fields,
    )


def loss_errors(rank: int, groups: DataParallelReduce) -> dict[str, float]:
    """Per case the largest difference between the split step and the whole one: loss, gradient,
    metrics.
    """
    data = everything()
    mask_sums = [max(float(m.sum()), 1.0) for m in data["loss_mask"].split(LENGTHS)]
    counts = dict(num_rollouts=len(LENGTHS), num_tokens=sum(mask_sums))
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    all_tokens, every = torch.ones(sum(LENGTHS), dtype=torch.bool), list(range(len(LENGTHS)))
    mine, share = [i for i in every if i % 2 == rank // 2], position % 2 == rank % 2
    here = torch.cat(
        [share.split(LENGTHS)[i] if i in mine else torch.zeros(LENGTHS[i]).bool() for i in every]
    )
    errors = {}
    for name, changes in LOSS_CASES.items():
        changes = dict(changes)
        values = changes.pop("values", False)
        settings = LossSettings.from_args(run_args(changes))
        whole = token_batch(data, all_tokens, every, values)
        expected, metrics = compute_loss(settings, whole, **counts)
        expected.backward()
        part = token_batch(data, share, mine, values)
        loss, shares = compute_loss(settings, part, **counts, reduce=groups)
        loss.backward()
        assert whole.log_probs is not None and whole.log_probs.grad is not None
        assert part.log_probs is not None and part.log_probs.grad is not None
        worst = [float((part.log_probs.grad - whole.log_probs.grad[here]).abs().max())]
        for key, value in ({"": expected.detach()} | metrics).items():
            got = (loss.detach() if key == "" else shares[key]).clone()
            dist.all_reduce(got, op=dist.ReduceOp.MAX if is_max_metric(key) else dist.ReduceOp.SUM)
            worst.append(float((got - value).abs()))
        errors[name] = max(worst)
    return errors


def advantage_errors(rank: int, groups: DataParallelReduce) -> dict[str, float]:
    """Whole responses, each data-parallel rank its own."""
    data = everything()
    lists = {
        name: list(data[name].split(LENGTHS)) for name in ("ref_log_probs", "rollout_log_probs")
    }
    batch = {
        **lists,
        "log_probs": list(data["log_probs"].split(LENGTHS)),
        "teacher_log_probs": lists["ref_log_probs"],
        "values": list(data["old_values"].split(LENGTHS)),
        "loss_masks": list(data["loss_mask"].split(LENGTHS)),
        "rewards": [1.0, -0.5, 0.25, 0.0, 2.0, -1.0],
        "response_lengths": LENGTHS,
        "total_lengths": [n + 2 for n in LENGTHS],
        "squared_probs": list((2 * data["log_probs"]).exp().split(LENGTHS)),
        "group_indices": [3, 3, 5, 5, 4, 4],
        "partition": list(range(len(LENGTHS))),
    }
    mine = [i for i in range(len(LENGTHS)) if i % 2 == rank // 2]
    errors = {}
    for name, changes in ADVANTAGE_CASES.items():
        settings = AdvantageSettings.from_args(run_args(changes))
        whole, part = dict(batch), {key: [entry[i] for i in mine] for key, entry in batch.items()}
        compute_advantages(settings, whole, Identity())
        compute_advantages(settings, part, groups)
        pairs = [
            (part[key][j], whole[key][i])
            for key in ("advantages", "returns")
            for j, i in enumerate(mine)
        ]
        worst = max(float((x - y).abs().max()) for x, y in pairs)
        errors[name] = max(
            worst, abs(part.get("mis_weight_mean", 0.0) - whole.get("mis_weight_mean", 0.0))
        )
    return errors


def worker(rank: int, port: int, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    sequence = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    groups = DataParallelReduce(2, torch.device("cpu"), data, sequence)
    torch.save(
        (loss_errors(rank, groups), advantage_errors(rank, groups)), f"{output}/rank{rank}.pt"
    )
    dist.barrier()
    dist.destroy_process_group()
