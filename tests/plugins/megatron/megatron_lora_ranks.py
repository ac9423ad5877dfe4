"""What the ranks of ``test_megatron_lora.py`` run: one launch, a trainer of an adapter in every
layout in turn.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ranks import (
    CP,
    EP,
    ETP,
    FULL,
    OVERLAP,
    PP,
    SP,
    TP,
    VPP,
    Layout,
    check_each_model_once,
    leave_groups,
    make_arguments,
    rank_batch,
)
from pairwise import pairwise

from slime.plugins.tools.verify.reference import leave_model

LARGE, STEP = 1e6, 16.0
"""As in ``slime/plugins/tools/verify/reference.py``: a step of Adam changes a factor by ``-STEP`` times
its gradient.
"""
LORA: dict[str, Any] = dict(
    lora_rank=3,
    lora_alpha=6.0,
    use_rslora=False,
    lora_target_modules=("all-linear",),
    lora_sync="merged",
    lr=LARGE * STEP,
    adam_eps=LARGE,
    weight_decay=0.0,
    clip_grad=1e9,
)
SOME = ("q_proj", "v_proj", "up_proj", r"model\.layers\.3\..*")


def lora(
    model: str,
    world: int = 1,
    megatron: dict[str, Any] | None = None,
    role: str = "actor",
    **flags: Any,
) -> Layout:
    return Layout(model, world, megatron or {}, {**LORA, **flags}, role)


KL = dict(use_kl_loss=True, kl_loss_coef=0.1)
WITH_EXPERTS = dict(lora_target_modules=("all-linear", "experts"), **KL)
OF_EXPERTS = [
    lora("qwen3_moe", 1, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {EP: 2}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {TP: 2, ETP: 2}, **WITH_EXPERTS),  # each expert is divided
    lora("qwen3_moe", 2, {TP: 2, ETP: 1}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {TP: 2, ETP: 1, EP: 2}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {EP: 2, **OVERLAP}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {EP: 2, "use_distributed_optimizer": False}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {TP: 2, ETP: 2, "use_distributed_optimizer": False}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {PP: 2, **FULL}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {CP: 2, EP: 2}, **WITH_EXPERTS),
    lora("qwen3_moe", 4, {TP: 2, EP: 2, ETP: 1}, **WITH_EXPERTS),
    lora("qwen3_moe", 4, {TP: 2, PP: 2, ETP: 1, EP: 2}, **WITH_EXPERTS),
    lora("qwen3_moe", 2, {TP: 2, ETP: 1, EP: 2}, lora_target_modules=("experts",), use_rslora=True),
    # the first layer is dense
    lora("glm4_moe", 2, {EP: 2}, lora_target_modules=("all-linear", "experts")),
    lora("qwen3_moe", 2, {TP: 2, ETP: 2}, lora_init="kaiming", **WITH_EXPERTS),
    lora("qwen3_moe", 2, {EP: 2}, lora_init="gaussian", **WITH_EXPERTS),
]
PLAN = [
    lora("qwen3", **KL),
    lora("qwen3", 2, {TP: 2}, **KL),
    lora("qwen3", 2, {TP: 2, SP: True}, **KL),
    lora("qwen3", 2, {PP: 2}, **KL),
    lora("qwen3", 2, {PP: 2, VPP: 2, **OVERLAP}, **KL),
    lora("qwen3", 2, {CP: 2}, **KL),
    lora("qwen3", 2, OVERLAP, **KL),
    lora("qwen3", 2, {"use_distributed_optimizer": False}, **KL),
    lora("qwen3", 4, {TP: 2, PP: 2, SP: True}, **KL),
    lora("llama", 2, {TP: 2, SP: True, **FULL}),  # tied embeddings
    lora("llama", 2, {PP: 2, **FULL}),
    lora("qwen2", 2, {TP: 2}),  # biases
    lora("qwen3", lora_target_modules=SOME),
    lora("qwen3", 2, {TP: 2, SP: True}, lora_target_modules=SOME, use_rslora=True),
    # the first stage trains nothing
    lora("qwen3", 2, {PP: 2}, lora_target_modules=(r"model\.layers\.3\..*",)),
    lora("qwen3", 2, {PP: 2}, lora_target_modules=(r"model\.layers\.0\..*",)),
    lora("glm4"),  # gate and up are one projection
    lora("glm4", 2, {TP: 2, SP: True}),
    lora("qwen3_moe", 2, {EP: 2}),  # routed experts have no adapters
    lora("glm4_moe", 2, {TP: 2}),  # shared experts do
    lora("mistral", 2, {TP: 2, SP: True}),
    # gated delta nets and gated attention
    lora("qwen3_5", **KL),
    lora("qwen3_5", 2, {TP: 2, SP: True}, **KL),
    lora("qwen3_5", 2, {CP: 2, **FULL}, **KL),
    lora("qwen3_5", 2, {PP: 2, **OVERLAP}, **KL),
    lora("qwen3_next", 2, {TP: 2, ETP: 1, EP: 2}),
    lora("qwen3_next", 4, {TP: 2, CP: 2}, lora_sync="adapter"),
    lora("qwen3", 2, {TP: 2, SP: True}, lora_sync="adapter"),
    lora("qwen3", 2, {PP: 2}, lora_sync="adapter"),
    lora("llama", 2, {TP: 2}, kl_coef=0.01),  # a reference of another base
    lora("llama", 2, {PP: 2}, kl_coef=0.01),
    lora("llama", 2, {TP: 2, SP: True}, role="critic", advantage_estimator="ppo"),
    lora("qwen3", 2, {PP: 2}, role="critic", advantage_estimator="ppo"),
    *OF_EXPERTS,
]
BOTH: dict[str, Any] = dict(lora_target_modules=("all-linear", "experts"))
LATER = [
    (lora("qwen3", 2, OVERLAP), lora("qwen3", 2)),
    (lora("qwen3_5", 2, OVERLAP), lora("qwen3_5", 2)),
    (lora("qwen3_moe", 2, {EP: 2, **OVERLAP}, **BOTH), lora("qwen3_moe", 2, {EP: 2}, **BOTH)),
]
"""Pairs that also take more steps in a row, each with the weights that the step before gathers in
its time.
"""
LATER_LAYOUTS = [layout for pair in LATER for layout in pair]
EVERY_LAYOUT = [*PLAN, *LATER_LAYOUTS]
PLAN = pairwise(EVERY_LAYOUT, kept=[*LATER_LAYOUTS, *OF_EXPERTS[1:3]])
KEPT = [
    layout
    for layout in PLAN
    if layout.model == "qwen3" and "use_kl_loss" in layout.flags and layout.world < 4
]
KEPT += [layout for layout in PLAN if layout == lora("qwen3_5", 2, {TP: 2, SP: True}, **KL)] + [
    layout for layout in OF_EXPERTS[1:3] if layout in PLAN
]
"""Those that also write and read files."""
ORDINARY: dict[str, Any] = dict(
    lr=1e-2, adam_eps=1e-8, weight_decay=0.01, clip_grad=1.0, keep_old_actor=True
)


def arguments(layout: Layout, paths: dict[str, Path], backend: str) -> Any:
    """Actors load an adapter, because that of a new run computes nothing; those with ``lora_init``
    begin with one.
    """
    args = make_arguments(layout, paths, backend)
    if layout.role == "actor" and args.lora_rank and "lora_init" not in layout.flags:
        args.load = str(paths[adapter_key(layout)])
    return args


def adapter_key(layout: Layout) -> str:
    return (
        f"adapter of {layout.model} {layout.flags['lora_target_modules']} "
        f"{layout.flags['use_rslora']}"
    )


def results_of(backend: Any, args: Any, samples_of: Any) -> dict[str, Any]:
    """The adapter as loaded, the gradients of its factors, and what a step returned."""
    from slime.backends.train_loop import train_on_rollout

    out: dict[str, Any] = {"loaded": _factors(backend), "base": backend.adapter.identity()}
    if backend.role == "actor":
        out["log_probs"] = backend.log_probs(samples_of(0, 0), temperature=1.0)["log_probs"]
        if args.kl_coef or args.use_kl_loss:
            out["ref"] = backend.log_probs(samples_of(0, 0), "ref", temperature=1.0)["log_probs"]
        out["sent"] = {name: tensor.clone() for name, tensor in backend.named_weights()}
        if (source := backend.adapter_source()) is not None:
            out["asked"] = [
                source.any_rank(backend.rank == backend.world_size - 1),
                source.any_rank(False),
            ]
            out["alone"] = {name: tensor.clone() for name, tensor in source.factors}
        out["changing"], out["targets"] = backend.adapter_sync.changing, backend.adapter.targets()
    else:
        out["values"] = backend.values(samples_of(0, 0))
    out["metrics"] = train_on_rollout(backend, samples_of(0, 0))[0]
    after = _factors(backend)
    out["gradients"] = {name: (out["loaded"][name] - after[name]) / STEP for name in after}
    backend.adapter._identity = None
    out["base_after"] = backend.adapter.identity()
    return out


def _factors(backend: Any) -> dict[str, Any]:
    from slime.models.peft_files import named_factors

    backend.finish_update()
    return {
        name: x.detach().clone() for name, x in named_factors(backend.adapter.factors()).items()
    }


def files_of(make: Any, layout: Layout, folder: Path, samples_of: Any) -> dict[str, Any]:
    """A reference model, a snapshot, a resumed run, and exports, all with an ordinary optimizer."""
    from slime.backends.train_loop import train_on_rollout

    def train(backend: Any, seed: int) -> dict[str, float]:
        return train_on_rollout(backend, samples_of(seed, 0))[0]

    flags = {**layout.flags, **ORDINARY}
    # frozen, too
    separate = make(replace(layout, flags={"only_train_params_name_list": ("model.norm.weight",)}))
    out: dict[str, Any] = {"separate": separate.log_probs(samples_of(0, 0))["log_probs"]}
    leave_model()
    backend = make(replace(layout, flags=flags))
    out["copies"] = sorted(backend.bank.copies), sorted(backend._whole_bank.copies)
    train(backend, 0)
    out["ref_after"] = backend.log_probs(samples_of(0, 0), "ref")["log_probs"]
    out["actor"] = backend.log_probs(samples_of(0, 0))["log_probs"]
    backend.copy_weights("actor", "old_actor")
    train(backend, 1)
    backend.save(folder / "iter_0000001" / "actor")
    backend.save_hf(folder / "adapter")
    out["saved"] = _factors(backend)
    out["straight"], out["end"] = train(backend, 2), _factors(backend)
    out["old"] = backend.log_probs(samples_of(0, 0), "old_actor")["log_probs"]
    leave_model()
    again = make(replace(layout, flags=flags))
    again.load(folder / "iter_0000001" / "actor")
    out["resumed"], out["resumed_end"] = train(again, 2), _factors(again)
    out["resumed_old"] = again.log_probs(samples_of(0, 0), "old_actor")["log_probs"]
    leave_model()
    return out


def run(layout: Layout, rank: int, paths: dict[str, Path], port: int) -> dict[str, Any]:
    from slime.backends.create import create_backend
    from slime.backends.train_loop import train_on_rollout

    mine: tuple[int, int] = (0, 1)

    def make(layout: Layout) -> Any:
        nonlocal mine
        args = arguments(layout, paths, "megatron")
        backend: Any = create_backend(args, layout.role, rank, layout.world, "127.0.0.1", port)
        mine = backend.data_parallel_rank, backend.data_parallel_size
        return backend

    def samples_of(seed: int, zero: int) -> dict[str, Any]:
        return rank_batch(seed, zero, *mine)

    backend = make(layout)
    out = results_of(backend, backend.args, samples_of)
    if any(layout in pair for pair in LATER):
        # the last but one trains no sample, and still moves weights
        steps = ((1, 0), (2, 0), (0, 0), (1, 4), (2, 0))
        out["later"] = []
        for number, (seed, zero) in enumerate(steps):
            if number == 3:
                backend.finish_update()
            out["later"].append(train_on_rollout(backend, samples_of(seed, zero))[0])
    backend.adapter.base[0][1].detach().view(-1)[-1] += 1  # one value: another base
    backend.adapter._identity = None
    out["base_changed"] = backend.adapter.identity()
    leave_model()
    if layout in KEPT:
        out |= files_of(make, layout, paths["output"] / str(PLAN.index(layout)), samples_of)
    return out | {"data_rank": mine}


def worker(rank: int, ports: Any, paths: dict[str, Path]) -> None:
    """One rank (``launch.py``). Each world size is a process group of the first so many ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    check_each_model_once()
    results: dict[str, Any] = {}
    for number, layout in sorted(enumerate(PLAN), key=lambda item: -item[1].world):
        if rank >= layout.world:
            continue
        try:
            results[layout.name] = run(layout, rank, paths, ports.get(number))
        except Exception:  # the others go on: each layout is a test of its own
            results[layout.name] = {"error": traceback.format_exc()}
            print(f"rank {rank}: {layout.name}\n{traceback.format_exc()}", flush=True)
        leave_groups()
    torch.save(results, paths["output"] / f"rank{rank}.pt")
