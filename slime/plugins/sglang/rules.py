"""Which flags exclude or need each other with SGLang."""

from __future__ import annotations

from pathlib import Path

from slime.config.engine import OUTER_CACHE, outer_caches, readable_models, shared_groups
from slime.config.rules import RuleSet, Run

SGLANG_FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures of which SGLang quantizes exactly the projections that slime sends as 8-bit
floats.
"""
_NO_SCALES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures of which SGLang (0.5.15 and 0.5.23) loads no scales of blocks: it renames them to
those of tensors, and ignores names that it does not know. The scales would keep the values of
uninitialized memory."""


def _outer_cache_problems(run: Run) -> list[str]:
    """Refuse KV caches that outlive a weight update."""
    args = run.args
    if args.rollout_backend != "sglang" or args.debug_rollout_only:
        return []
    updated = [
        group for model in readable_models(args) if model.update_weights for group in model.groups
    ]
    given = {
        option for group in updated for option in outer_caches({**args.sglang, **group.overrides})
    }
    return [
        f"{option.replace('--', '--sglang-', 1)}: {OUTER_CACHE}: leave it out. "
        "--sglang-enable-hierarchical-cache keeps KV in the host memory of the server, which "
        "slime flushes"
        for option in sorted(given)
    ]


def _pipeline_problems(run: Run) -> list[str]:
    """Refuse pipeline stages of colocated servers: SGLang passes the same CUDA IPC handle to all
    pipeline stages of a tensor-parallel rank, but a handle can be opened only on the GPU that it
    comes from."""
    args = run.args
    stages = [
        int({**args.sglang, **group.overrides}.get("pp_size") or 1)
        for group, _ in shared_groups(args)
    ]
    if max(stages, default=1) == 1:
        return []
    return [
        f"--colocate with servers of {max(stages)} pipeline stages (--sglang-pp-size): CUDA IPC "
        "sends weights only to the tensor-parallel ranks of one stage; use only tensor "
        "parallelism, or --update-weight-transport disk"
    ]


def _quantization_problems(run: Run) -> list[str]:
    """Refuse models of which SGLang would not quantize the same layers as slime."""
    args = run.args
    if not args.rollout_quantization or args.rollout_backend != "sglang":
        return []
    architectures = set(run.config.get("architectures") or ())
    option = f"--rollout-quantization {args.rollout_quantization}"
    other = "use the embedded engine"
    if lost := ", ".join(sorted(architectures & set(_NO_SCALES))):
        return [f"{option}: SGLang does not load the scales of blocks of {lost}; {other}"]
    if unknown := ", ".join(sorted(architectures - set(SGLANG_FAMILIES))):
        known = ", ".join(SGLANG_FAMILIES)
        return [
            f"{option}: slime does not know which layers of {unknown} SGLang quantizes, but of "
            f"{known}; {other}"
        ]
    return []


def _serves_on_cpu(run: Run) -> bool:
    args = run.args
    has_gpu = args.sglang.get("device") != "cpu" and (run.machine.cuda or run.machine.in_cluster)
    return (
        args.rollout_backend == "sglang" and not args.rollout_external_engine_addrs and not has_gpu
    )


RULES = RuleSet(
    Path(__file__).with_name("rules.json"),
    {
        "SGLang on a CPU": _serves_on_cpu,
        "keys that differ": lambda run: (
            run.args.sglang.get("api_key") != run.args.router.get("api_key")
        ),
    },
    (_outer_cache_problems, _pipeline_problems, _quantization_problems),
)
