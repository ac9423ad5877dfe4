"""What the ranks of ``test_megatron_checkpoint.py`` run: save once, read by other layouts."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ranks import (
    CP,
    EP,
    ETP,
    OFFLOAD,
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
from needs import ALL

FLAGS: dict[str, Any] = dict(lr_decay_style="linear", lr_warmup_iters=3, keep_old_actor=True)


@dataclass(frozen=True)
class Case:
    """A layout that saves, and the layouts that read what it saved."""

    saved: Layout
    readers: tuple[Layout, ...]
    further: tuple[Layout, ...] = ()  # readers of the long circle
    async_save: bool = False  # training goes on meanwhile


def layout(model: str, **megatron: Any) -> Layout:
    return Layout(model, 2, megatron, FLAGS)


def rank_files(model: str, **megatron: Any) -> Layout:
    """With ``--ckpt-format torch``."""
    return Layout(model, 2, megatron, {**FLAGS, "ckpt_format": "torch"})


def in_bf16(model: str, **megatron: Any) -> Layout:
    """With bf16 weights and gradients, and float32 main parameters."""
    return Layout(
        model, 2, {"grad_reduce_in_bf16": True, **megatron}, {**FLAGS, "train_dtype": "bfloat16"}
    )


def one_layer(model: str, **megatron: Any) -> Layout:
    """The last layer alone is trained, so the first pipeline stage has no optimizer state."""
    return Layout(model, 2, megatron, {**FLAGS, "only_train_params_name_list": [r"layers\.3\."]})


CASES = [
    Case(
        layout("qwen3", **{TP: 2, SP: True}),
        (
            layout("qwen3", **{TP: 2, SP: True}),
            layout("qwen3", **{PP: 2, VPP: 2}),
            layout("qwen3", **OVERLAP),
        ),
        further=(layout("qwen3", **{PP: 2}), layout("qwen3", **{CP: 2})),
    ),
    Case(
        layout("qwen3_moe", **{EP: 2}),
        (layout("qwen3_moe", **{EP: 2}), layout("qwen3_moe", **{TP: 2, ETP: 1})),
        further=(layout("qwen3_moe", **{TP: 2}), layout("qwen3_moe", **{PP: 2})),
        async_save=True,
    ),
    Case(
        layout("glm4_moe", **{PP: 2}),
        (layout("glm4_moe", **{EP: 2}),),
        further=(layout("glm4_moe", **{PP: 2}),),
    ),
    Case(
        layout("gpt_oss", **{TP: 2, ETP: 1}),
        (layout("gpt_oss", **{EP: 2}),),
        further=(layout("gpt_oss", **{TP: 2, ETP: 1}), layout("gpt_oss", **{PP: 2})),
    ),
    Case(
        layout("qwen3_next", **{EP: 2}),
        (layout("qwen3_next", **{TP: 2}),),
        further=(layout("qwen3_next", **{EP: 2}),),
    ),
    Case(
        layout("qwen3_5", **{TP: 2}),
        (layout("qwen3_5", **{PP: 2}),),
        further=(layout("qwen3_5", **{TP: 2}), layout("qwen3_5", **{CP: 2})),
    ),
    Case(
        layout("glm_moe_dsa", **{TP: 2}),
        (layout("glm_moe_dsa", **{PP: 2}),),
        further=(layout("glm_moe_dsa", **{TP: 2}), layout("glm_moe_dsa", **{CP: 2})),
    ),
    Case(
        layout("llama", use_distributed_optimizer=False, **{TP: 2}),
        (layout("llama", use_distributed_optimizer=False, **{TP: 2}), layout("llama", **{PP: 2})),
        further=(layout("llama", **{TP: 2}),),
        async_save=True,
    ),
    Case(in_bf16("qwen3", use_distributed_optimizer=False), (in_bf16("qwen3", **OFFLOAD),)),
    Case(
        in_bf16("qwen3_moe", **{EP: 2}),
        (in_bf16("qwen3_moe", **{EP: 2}),),
        further=(in_bf16("qwen3_moe", **{EP: 2, **OFFLOAD}),),
    ),
    Case(
        layout("qwen3", **{TP: 2, **OFFLOAD}),
        (layout("qwen3", **{PP: 2, **OFFLOAD}),),
        further=(layout("qwen3", **OFFLOAD),),
    ),
    Case(one_layer("qwen3", **{PP: 2}), (one_layer("qwen3", **{PP: 2}),)),
    Case(rank_files("qwen3", **{PP: 2, VPP: 2}), (rank_files("qwen3", **{PP: 2, VPP: 2}),)),
    Case(
        rank_files("qwen3_moe", **{EP: 2}), (rank_files("qwen3_moe", **{EP: 2}),), async_save=True
    ),
]
"""Each layout, optimizer and kind of file writes and reads at each commit; ``FURTHER`` has more of
their pairs.
"""
FURTHER = [
    Case(
        layout("minimax_m2", **{TP: 2}),
        (layout("minimax_m2", **{TP: 2}), layout("minimax_m2", **{PP: 2})),
    ),
    Case(
        in_bf16("qwen3", use_distributed_optimizer=False),
        (in_bf16("qwen3", use_distributed_optimizer=False), in_bf16("qwen3")),
    ),
    Case(in_bf16("qwen3", **OFFLOAD), (in_bf16("qwen3", **OFFLOAD), in_bf16("qwen3"))),
    Case(
        rank_files("llama", use_distributed_optimizer=False, **{TP: 2}),
        (rank_files("llama", use_distributed_optimizer=False, **{TP: 2}),),
    ),
]
if ALL:
    CASES = [
        *(replace(case, readers=case.further) for case in CASES if case.further),
        *FURTHER,
    ]
REFUSED = [
    Case(rank_files("qwen3", **{TP: 2}), (layout("qwen3", **{PP: 2}), layout("qwen3", **{TP: 2}))),
]

MADE: list[Layout] = []
"""Every backend so far: each gets groups, and a port, of its own."""


def worker(rank: int, ports: Any, paths: dict[str, Path]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    check_each_model_once()
    results: list[Any] = []
    for number, case in enumerate([*CASES, *REFUSED]):
        folder = paths["output"] / f"case{number}"
        backend = make(case.saved, rank, paths, ports, case.async_save)
        train(backend, 0)
        backend.copy_weights("actor", "old_actor")
        train(backend, 1)
        backend.save(folder)
        straight = after(backend)
        if case.async_save:
            backend.saving.finish(60)
        read = []
        for reader in case.readers:
            try:
                backend = make(reader, rank, paths, ports)
                backend.load(folder)
                read.append(after(backend))
            except Exception:
                read.append({"error": traceback.format_exc()})
                print(f"rank {rank}: {reader.name}\n{traceback.format_exc()}", flush=True)
        results.append((straight, read))
    torch.save(results, paths["output"] / f"rank{rank}.pt")


def make(
    layout: Layout, rank: int, paths: dict[str, Path], ports: Any, async_save: bool = False
) -> Any:
    from slime.backends.create import create_backend

    leave_groups()
    MADE.append(layout)
    args = make_arguments(layout, paths, "megatron")
    args.async_save = async_save
    return create_backend(args, "actor", rank, layout.world, "127.0.0.1", ports.get(len(MADE)))


def train(backend: Any, seed: int) -> dict[str, float]:
    from slime.backends.train_loop import train_on_rollout

    batch = rank_batch(seed, 0, backend.data_parallel_rank, backend.data_parallel_size)
    return train_on_rollout(backend, batch)[0]


def after(backend: Any) -> dict[str, Any]:
    """Two more steps, the weights then, and the old actor's score and weights before."""
    old = backend.log_probs(rank_batch(0, 0, 0, 1), "old_actor")["log_probs"]
    # as it is sent to the engines of a run that resumes between two updates
    with backend.using("old_actor"):
        sent = {name: tensor.clone() for name, tensor in backend.named_weights()}
    metrics = [train(backend, 2), train(backend, 3)]
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
    return {"metrics": metrics, "weights": weights, "old": old, "sent": sent}
