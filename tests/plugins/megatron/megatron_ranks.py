"""What the ranks of ``test_megatron_layouts.py`` run: one launch, every layout in turn."""

from __future__ import annotations

import functools
import gc
import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from needs import ALL
from pairwise import pairwise

from slime.plugins.tools.verify.reference import batch_of_rank, leave_model


@dataclass(frozen=True)
class Layout:
    """A model, sizes of its parallel dimensions (Megatron's flags), and flags of slime's."""

    model: str
    world: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    role: str = "actor"
    rehearse: bool = False
    """Measure memory with passes over other samples first, which must leave no trace."""

    @property
    def name(self) -> str:
        words = [self.model, *(f"{k}={v}" for k, v in {**self.megatron, **self.flags}.items())]
        words += ["rehearsed"] if self.rehearse else []
        return " ".join(
            [*words, f"on {self.world}", *([self.role] if self.role != "actor" else [])]
        )

    @property
    def reference(self) -> tuple[Any, ...]:
        """What its results are compared with: the same model and flags on one rank of FSDP."""
        return self.model, self.role, tuple(sorted(self.flags.items()))


TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP, VPP = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
SP = "sequence_parallel"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OFFLOAD = {"optimizer_cpu_offload": True}
FULL = {"recompute_granularity": "full"}
REINFORCE = tuple(dict(advantage_estimator="gspo", kl_coef=0.0, entropy_coef=0.01).items())

EXPERTS = (
    "qwen3_moe",
    "qwen3_moe_sparse",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "moonlight",
    "minimax_m2",
    "deepseek_v32",
    "glm_moe_dsa",
)
EXPERTS += ("gpt_oss",)
DENSE = ("phi3", "olmo3", "granite", "seed_oss", "smollm3")
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "glm4", "gemma3", *DENSE, *EXPERTS)

PLAN: list[Layout] = [
    # every family at TP1, TP2, PP2 and, with experts, EP2
    *(Layout(model) for model in FAMILIES),
    *(
        Layout(model, 2, {TP: 2, SP: model not in ("llama", "qwen2")})
        for model in FAMILIES
        if model != "gpt_oss"
    ),
    Layout("gpt_oss", 2, {TP: 2, ETP: 1}),
    *(Layout(model, 2, {PP: 2}) for model in FAMILIES),
    *(Layout(model, 2, {EP: 2}) for model in EXPERTS),
    # every layout of two ranks
    Layout("qwen3", 2, {}),
    Layout("qwen3", 2, {CP: 2}),
    Layout("qwen3", 2, {PP: 2, VPP: 2}),
    Layout("llama3", 2, {PP: 2, VPP: 2, **OVERLAP}),
    Layout("qwen3", 2, OVERLAP),
    Layout("qwen3_moe", 2, {**OVERLAP, EP: 2}),
    Layout("llama", 2, {TP: 2, **FULL}),
    Layout("qwen3_moe", 2, {PP: 2, **FULL}),
    Layout("qwen3", 2, {"use_distributed_optimizer": False}),
    Layout("qwen3_moe", 2, {EP: 2, "use_distributed_optimizer": False}),
    Layout("qwen3", 2, {TP: 2, **OFFLOAD}),
    Layout("qwen3_moe", 2, {EP: 2, **OVERLAP, **OFFLOAD, "optimizer_offload_fraction": 0.5}),
    Layout("qwen3_moe", 2, {TP: 2, ETP: 1}),
    Layout("qwen3_moe", 2, {TP: 2, ETP: 1, EP: 2}),
    Layout("glm4_moe", 2, {CP: 2}),
    Layout("qwen3_moe", 2, {CP: 2, EP: 2}),
    Layout("deepseek_v3", 2, {CP: 2}),
    Layout("moonlight", 2, {CP: 2, EP: 2}),
    Layout("deepseek_v32", 2, {CP: 2}),
    Layout("glm_moe_dsa", 2, {CP: 2, **FULL}),
    Layout("deepseek_v32", 4, {TP: 2, PP: 2}),
    Layout("glm_moe_dsa", 4, {PP: 2, EP: 2, **FULL}),
    Layout("gpt_oss", 2, {CP: 2}),
    # communication of tensor parallelism with the products of matrices
    # positions that are stretched
    Layout("qwen3_yarn"),
    Layout("glm4_yarn", 2, {TP: 2}),
    Layout("llama_linear", 2, {CP: 2}),
    # windows
    Layout("mistral_tied", 2, {PP: 2}),
    Layout("mistral", 2, {CP: 2}),
    Layout("qwen2_window", 2, {TP: 2}),
    Layout("gemma3_linear", 2, {CP: 2}),
    Layout("gemma3_linear", 4, {TP: 2, PP: 2}),
    Layout("qwen2_window", 2, {PP: 2, VPP: 2}),
    # norms over all heads
    Layout("minimax_m2_tied", 4, {TP: 2, PP: 2}),
    Layout("minimax_m2", 4, {TP: 2, EP: 2, ETP: 1, **FULL}),
    # gated delta nets
    *(Layout(model) for model in ("qwen3_next", "qwen3_next_tied", "qwen3_5", "qwen3_5_moe")),
    Layout("qwen3_5", 2, {PP: 2, **FULL}),
    Layout("qwen3_next", 2, {EP: 2}),
    Layout("qwen3_5_moe", 2, {PP: 2}),
    Layout("qwen3_next_tied", 4, {PP: 2, EP: 2}),
    Layout("qwen3_5_moe", 2, {CP: 2, EP: 2}),
    Layout("qwen3_5", 2, {CP: 2, **FULL}),
    Layout("qwen3_5", 4, {TP: 2, CP: 2, SP: True}),
    Layout("qwen3_next_tied", 4, {TP: 2, EP: 2, ETP: 1, **OVERLAP}),
    Layout("qwen3_next", 4, {TP: 4}),
    # each layer waits for its own parameters
    Layout("qwen3_5", 2, {**OVERLAP, "ddp_bucket_size": 1000}),
    # of four
    Layout("qwen3", 4, {TP: 2, PP: 2, SP: True}),
    Layout("qwen3", 4, {TP: 2, CP: 2}),
    Layout("llama", 4, {TP: 2, SP: True, **OVERLAP}),
    Layout("qwen3", 4, {PP: 2, CP: 2}),
    Layout("qwen3", 4, {PP: 4}),
    Layout("qwen3", 4, {CP: 4}),
    Layout("llama", 4, {TP: 4}),
    Layout("qwen3_moe", 4, {TP: 2, EP: 2, ETP: 1}),
    Layout("qwen3_moe", 4, {PP: 2, EP: 2}),
    Layout("glm4_moe", 4, {EP: 4}),
    Layout("glm4_moe", 4, {TP: 2, ETP: 1, EP: 4}),
    Layout("deepseek_v3", 4, {TP: 2, PP: 2, EP: 2, ETP: 1}),
    # frozen embeddings: the layers of a checkpoint still get gradients
    Layout("glm4", 2, {PP: 2, **FULL}, dict(freeze_params_name_list=("embed_tokens",))),
    # algorithms that sum over a sequence, a reference model of other weights, a critic
    Layout("qwen3", 2, {CP: 2}, dict(REINFORCE)),
    Layout("qwen3", 2, {TP: 2}, dict(REINFORCE)),
    Layout("llama", 2, {PP: 2}, dict(kl_coef=0.01, kl_loss_type="k3")),
    Layout("llama", 2, {TP: 2, SP: True}, dict(advantage_estimator="ppo"), role="critic"),
    Layout("qwen3", 2, {PP: 2}, dict(advantage_estimator="ppo"), role="critic"),
    Layout("qwen3", 2, {CP: 2}, dict(advantage_estimator="ppo", kl_coef=0.3), role="critic"),
]

# passes without a backward in packs of their own: fewer than in training; with several stages more
FORWARD_PACKS = [
    Layout(model, world, sizes, dict(log_probs_max_tokens_per_gpu=budget), role)
    for model, world, sizes, budget, role in (
        ("qwen3", 1, {}, 100, "actor"),
        ("qwen3", 2, {CP: 2}, 50, "actor"),
        ("qwen3", 2, {PP: 2}, 20, "actor"),
        ("qwen3", 2, {PP: 2, VPP: 2}, 25, "actor"),
        ("qwen3_moe", 2, {EP: 2}, 100, "actor"),
    )
]
PLAN += FORWARD_PACKS

PLAN += [
    Layout(model, world, sizes, role=role, rehearse=True)
    for model, world, sizes, role in (
        ("llama", 1, {}, "actor"),
        ("qwen3", 2, {PP: 2, VPP: 2, **OVERLAP}, "actor"),
        ("qwen3", 2, {CP: 2}, "actor"),
        # its router counts tokens for the experts' biases
        ("glm4_moe", 2, {**OVERLAP, EP: 2}, "actor"),
        ("qwen3", 2, {TP: 2, **OFFLOAD}, "actor"),
    )
]

RECORDED = dict(use_routing_replay=True)
PLAN += [
    # experts as in the pass of the old log-probs: the same ones, if every row finds its own
    Layout("qwen3_moe", 1, {}, RECORDED),
    Layout("qwen3_moe", 2, {TP: 2}, RECORDED),
    Layout("glm4_moe", 2, {PP: 2, **FULL}, RECORDED),
    Layout("deepseek_v3", 2, {CP: 2}, RECORDED),
    Layout("qwen3_moe", 2, {EP: 2}, RECORDED),
    Layout("qwen3_moe", 2, {TP: 2}, {**RECORDED, "log_probs_max_tokens_per_gpu": 120}),
]
EVERY_LAYOUT = PLAN
PLAN = pairwise(EVERY_LAYOUT)
FORWARD_PACKS = [layout for layout in FORWARD_PACKS if layout in PLAN]
OF_ENGINE = dict(use_rollout_routing_replay=True, use_routing_replay=True)
ROUTED: list[Layout] = [
    Layout("glm4_moe", 1, {}, OF_ENGINE),
    Layout("glm4_moe", 2, {TP: 2}, OF_ENGINE),
    Layout("glm4_moe", 2, {PP: 2, **FULL}, OF_ENGINE),
    Layout("glm4_moe", 2, {PP: 2, VPP: 2}, OF_ENGINE),
    Layout("glm4_moe", 2, {CP: 2}, OF_ENGINE),
    Layout("glm4_moe", 2, {EP: 2, **FULL}, OF_ENGINE),
]
"""Experts as an engine chose them; compared with the first."""
if ALL:  # the others have each of its properties
    ROUTED = [ROUTED[0], ROUTED[2]]
else:
    del ROUTED[2]


def results_of(backend: Any, args: Any, samples_of: Any) -> dict[str, Any]:
    """Scores, two optimizer steps on different samples (the second leaves half of the groups out),
    and weights.
    """
    from slime.backends.train_loop import train_on_rollout

    out: dict[str, Any] = {}
    critic = backend.role == "critic"
    ran: list[int] = []  # micro-batches of each pass

    def aligned(*given: Any) -> Any:
        micro_batches = type(backend).aligned(backend, *given)
        ran.append(len(micro_batches))
        return micro_batches

    backend.aligned = aligned
    if not critic:
        out["loaded"] = {name: tensor.clone() for name, tensor in backend.named_weights()}
        out.update(backend.log_probs(samples_of(0, 0), with_entropy=True, temperature=1.0))
    else:
        out["values"] = backend.values(samples_of(0, 0))
    out["packs"] = ran[-1]
    del backend.aligned
    batches = [samples_of(0, 0), samples_of(3, 2)]
    if critic and args.kl_coef:  # as the actor sends them
        for batch in batches:
            batch["log_probs"] = batch["rollout_log_probs"]
            batch["ref_log_probs"] = [2 * log_probs for log_probs in batch["rollout_log_probs"]]
    out["metrics"] = [train_on_rollout(backend, batch)[0] for batch in batches]
    if not critic:
        out["weights"] = {name: tensor.clone() for name, tensor in backend.named_weights()}
    else:
        out["values_after"] = backend.values(samples_of(0, 0))
    return out


def rank_batch(seed: int, zero_groups: int, rank: int, size: int) -> dict[str, Any]:
    """Group g goes to data-parallel rank g mod size; micro-batches of four samples of unequal
    length.
    """
    return batch_of_rank(rank, size, seed, zero_groups)


def engine_routing(batch: dict[str, Any]) -> list[Any]:
    """Two of four experts for every token but the last, in all four layers, drawn from the sample's
    own tokens.
    """
    import torch

    found = []
    for tokens in batch["tokens"]:
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        draws = torch.rand(len(tokens) - 1, 4, 4, generator=generator)
        found.append(draws.argsort(-1)[..., :2].to(torch.uint8))
    return found


def make_arguments(layout: Layout, paths: dict[str, Path], backend: str) -> Any:
    from fsdp_helpers import make_args

    flags = dict(layout.flags)
    if flags.get("kl_coef") and layout.role == "actor":
        flags["ref_load"] = str(paths[f"{layout.model}_reference"])
    # Adam divides a gradient by its size. With the default epsilon, one that is 0 but for rounding
    # (that of a key's bias) moves its weight by a part of a step, in a direction that depends on
    # the layout and on the processor.
    flags.setdefault("adam_eps", 1e-5)
    args = make_args(paths[layout.model], train_backend=backend, world_size=layout.world, **flags)
    args.megatron = dict(layout.megatron) if backend == "megatron" else {}
    return args


def run(layout: Layout, rank: int, paths: dict[str, Path], port: int) -> dict[str, Any]:
    from slime.backends.create import create_backend

    args = make_arguments(layout, paths, "megatron")
    backend: Any = create_backend(args, layout.role, rank, layout.world, "127.0.0.1", port)
    mine = backend.data_parallel_rank, backend.data_parallel_size

    def samples_of(seed: int, zero: int) -> dict[str, Any]:
        batch = rank_batch(seed, zero, *mine)
        return (
            batch | {"rollout_routed_experts": engine_routing(batch)} if layout in ROUTED else batch
        )

    if layout.rehearse:
        backend.rehearse(48)
    out = results_of(backend, args, samples_of)
    return out | {"data_rank": mine}


def leave_groups() -> None:
    """End all process groups: each gloo group has threads of its own, which slow down whatever
    comes next.
    """
    import torch.distributed as dist

    forget_graphs()
    leave_model()
    if dist.is_initialized():
        dist.destroy_process_group()


def forget_graphs() -> None:
    """Let models with experts be freed, and with them their process groups.

    Megatron's token dispatchers keep tensors of the last forward. Their graph leads to the
    parameters, whose hooks lead back to the dispatchers; Python's garbage collector cannot see the
    part of this cycle that is C++.
    """
    import torch
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for dispatcher in [x for x in gc.get_objects() if issubclass(type(x), MoETokenDispatcher)]:
        for name, value in list(vars(dispatcher).items()):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                setattr(dispatcher, name, None)


def check_each_model_once() -> None:
    """Compare a checkpoint with its model when it is first read, and not for each layout: a tenth
    of the time.
    """
    from slime.plugins.megatron import trained_model

    trained_model.check_checkpoint = functools.cache(trained_model.check_checkpoint)  # type: ignore[assignment]


def worker(rank: int, ports: Any, paths: dict[str, Path], plan: list[Layout]) -> None:
    """One rank (``launch.py``). Each world size is a process group of the first so many ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    check_each_model_once()
    results: dict[str, Any] = {}
    for world in (4, 2, 1):
        if rank >= world:
            break
        for number, layout in enumerate(plan):
            if layout.world != world:
                continue
            try:
                results[layout.name] = run(layout, rank, paths, ports.get(number))
            except Exception:  # the others go on: each layout is a test of its own
                results[layout.name] = {"error": traceback.format_exc()}
                print(f"rank {rank}: {layout.name}\n{traceback.format_exc()}", flush=True)
            leave_groups()
    torch.save(results, paths["output"] / f"rank{rank}.pt")
