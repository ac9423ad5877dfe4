"""Flags of low-rank adapters (LoRA), which are trained instead of the weights of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.config.files import regular_expression
from slime.config.flag import Section, flag
from slime.config.run import InitialWeights, weights_path
from slime.config.weight_sync import WeightSyncConfig, transport_part
from slime.registry import load

if TYPE_CHECKING:
    from slime.config.args import Args

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_NAME = "slime"
"""The name of the trained adapter in engines that load adapters by name."""
ALL_LINEAR = "all-linear"
EXPERTS = "experts"
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The projections that SGLang computes at once."""
PROJECTIONS = tuple(name for group in FUSED for name in group)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in config.json of the number of routed experts."""
_IN_FILE = {"lora_rank": "r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora"}
"""The flags that determine what an adapter computes, with their names in PEFT's file."""


@dataclass
class LoraConfig(Section):
    _title = "LoRA"

    lora_rank: int = flag(low=0)
    """Rank of the LoRA adapter that is trained instead of the weights; 0 trains the weights.
    Default: that of the adapter in --load, otherwise 0"""
    lora_alpha: float = flag(above=0)
    """Factor of the adapter, divided by the rank. Default: that of the adapter in --load, otherwise
    32
    """
    use_rslora: bool = flag()
    """Divide --lora-alpha by the square root of the rank (rsLoRA). Default: as in the adapter in
    --load, otherwise off"""
    lora_dropout: float = flag(0.0, low=0, high=0.99)
    """Probability with which inputs of the adapter are zeroed in training steps"""
    lora_target_modules: list[str] = flag(valid=regular_expression)
    """Linear layers that have an adapter, by the last parts of their names (q_proj, mlp.up_proj),
    or by regular expressions for whole names; experts for all routed experts. Default: those of the
    adapter in --load, otherwise all-linear"""
    lora_exclude_modules: list[str] | None = flag(valid=regular_expression)
    """Linear layers that have no adapter, named as in --lora-target-modules. Default: none"""
    lora_init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initialization of the adapter's factor A: uniform as in nn.Linear, or normal with standard
    deviation 1/rank
    """
    lora_base_quantization: Literal["int8", "nf4"] | None = None
    """FSDP on one rank: keep the weights of the base's linear layers in 8 bits, or in 4 bits
    (NormalFloat), through torchao (QLoRA). Default: the base is in --train-dtype"""
    lora_sync: Literal["adapter", "merged"] = flag()
    """What a weight sync sends after the first one: the adapter, or weights with the adapter merged
    into them. Default: adapter for embedded engines of the run unless --update-weight-transport is
    disk, otherwise merged"""
    lora_export: Literal["peft", "merged"] = "peft"
    """What --save-hf writes: the adapter in the format of PEFT, or the model with the adapter
    merged into its weights"""


def adapter_file(path: str | None) -> dict[str, Any] | None:
    """Return the content of ``adapter_config.json`` in a folder; None if there is none, or none
    that is readable.
    """
    file = Path(path).expanduser() / ADAPTER_CONFIG if path else None
    if file is None or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if isinstance(content, dict) and all(
        isinstance(content.get(name), int | float) for name in ("r", "lora_alpha")
    ):
        return content
    return None


def derive_lora(
    load_path: str | None, embedded: bool, lora: LoraConfig, sync: WeightSyncConfig
) -> None:
    """Fill in the shape of the adapter and how it is sent; ``embedded`` engines can load it."""
    found = adapter_file(load_path) or {}
    # A resumed run without these flags goes on with the adapter that it has.
    targets = found.get("target_modules") or ["all-linear"]
    lora.fill(
        lora_rank=int(found.get("r", 0)),
        lora_alpha=float(found.get("lora_alpha", 32)),
        use_rslora=bool(found.get("use_rslora", False)),
        lora_target_modules=[targets]
        if isinstance(targets, str)
        else [str(name) for name in targets],
    )
    # SGLang merges by default: an update by adapter needs its LoRA kernels and restricts the
    # layers.
    by_adapter = (
        lora.lora_rank
        and embedded
        and EXPERTS not in lora.lora_target_modules
        and not load(transport_part(sync).target).through_folder
    )
    lora.fill(lora_sync="adapter" if by_adapter else "merged")


def engine_adapter(rank: int, sync: str, backend: str) -> str | None:
    """Return the name under which engines load the trained adapter and requests ask for it
    (``lora_path``).

    It is None if requests need no name: no adapter is trained, it is merged into the weights, or
    the engines are embedded engines, which apply the adapter of the last update to every request.

    Args:
        rank, sync, backend: ``--lora-rank``, ``--lora-sync`` and ``--rollout-backend``.
    """
    return ADAPTER_NAME if rank and sync == "adapter" and backend != "embedded" else None


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with routed experts."""
    return any((config.get("text_config") or config).get(name) for name in _EXPERTS)


def check_lora(args: Args) -> list[str]:
    """Check the adapter in ``--load``, that all models of the run share its base, and that engines
    can load it.
    """
    if not args.lora_rank:
        return []
    problems = _contradictions(args, args.load)
    reference = weights_path(args.ref_load, args.ref_ckpt_step)
    base = (
        InitialWeights.of(args, args.hf_checkpoint).path(args.train_backend == "megatron")
        if args.hf_checkpoint
        else None
    )
    # The codes of a quantized base replace weights in place, so every model of the run must have
    # this base.
    others = {}
    if args.lora_base_quantization:
        others["--opd-teacher-load"] = weights_path(args.opd_teacher_load)
        if args.use_kl_loss or args.kl_coef or "ref_load" in args.explicit:
            others["--ref-load"] = reference
    problems += [
        f"--lora-base-quantization {args.lora_base_quantization}: {name} {path} is not the base "
        f"{base}, so its weights cannot replace the codes; name the base"
        for name, path in others.items()
        if path not in (None, base)
    ]
    if args.lora_sync == "adapter" and args.rollout_backend == "sglang":
        # Targets may be regular expressions. Only names of projections can be told to SGLang before
        # it starts.
        names = {name.rpartition(".")[2] for name in args.lora_target_modules} - {
            ALL_LINEAR,
            EXPERTS,
            *PROJECTIONS,
        }
        problems += [
            f"--lora-sync adapter: slime starts SGLang with adapters on {', '.join(PROJECTIONS)} "
            f"only, not on {name}; use --lora-sync merged"
            for name in sorted(names)
        ]
    # A refreshed reference is the base with a copy of the adapter.
    if args.ref_update_interval and reference not in (None, base):
        problems.append(
            "--ref-update-interval with --lora-rank refreshes the reference's adapter, so the "
            f"reference must have the same base: pass --ref-load {base}"
        )
    return problems


def _contradictions(lora: LoraConfig, load: str | None) -> list[str]:
    """Compare the flags with the adapter in ``--load``."""
    found = adapter_file(load) or {}
    return [
        f"--{name.replace('_', '-')} {getattr(lora, name)}, but the adapter in --load {load} "
        f"has {key} {found[key]}: leave the flag out"
        for name, key in _IN_FILE.items()
        if key in found and found[key] != getattr(lora, name)
    ]
