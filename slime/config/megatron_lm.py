"""Megatron-LM: the names of its flags, and a checkout of it on PYTHONPATH.

megatron-core's dataclasses give most flags (``tables/megatron_core-*.json``). Megatron-LM's own command line spells
some of them differently: :data:`ALIASES`. What Megatron-LM alone has is asked of its parser, in a separate process and
only when a flag is not known otherwise. The values become attributes of ``args`` for the user's own functions; slime's
backend reads none of them, and a notice says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Alias:
    """One flag: ``dest`` is the attribute that Megatron-LM gives it."""

    option: str
    dest: str
    kind: Literal["value", "switch", "negative", "list"]
    default: Any = None
    value_type: str = "str"
    field: str = ""


def _switch(option: str, dest: str = "", field: str = "") -> Alias:
    return Alias(option, dest or _dest(option), "switch", False, "bool", field)


def _negative(option: str, dest: str, field: str = "") -> Alias:
    return Alias(option, dest, "negative", True, "bool", field)


def _value(option: str, value_type: str = "str", default: Any = None, field: str = "", dest: str = "") -> Alias:
    return Alias(option, dest or _dest(option), "value", default, value_type, field)


def _dest(option: str) -> str:
    return option[2:].replace("-", "_")


ALIASES: tuple[Alias, ...] = (
    # model shape
    _switch("--swiglu", field="gated_linear_unit"),
    _switch("--squared-relu"),
    _switch("--quick-geglu"),
    _value("--norm-epsilon", "float", 1e-5, field="layernorm_epsilon"),
    _switch("--apply-layernorm-1p", "apply_layernorm_1p", field="layernorm_zero_centered_gamma"),
    _value("--vocab-size", "int"),
    _value("--padded-vocab-size", "int"),
    _value("--make-vocab-size-divisible-by", "int", 128),
    _value("--max-position-embeddings", "int"),
    _value("--seq-length", "int"),
    _value("--position-embedding-type", default="learned_absolute"),
    _switch("--use-rotary-position-embeddings"),
    _negative("--no-position-embedding", "add_position_embedding"),
    _value("--rotary-base", "float", 10000.0),
    _value("--rotary-percent", "float", 1.0),
    _value("--rotary-scaling-factor", "float", 1.0),
    _value("--rotary-seq-len-interpolation-factor", "int"),
    _switch("--use-rope-scaling"),
    _value("--rope-scaling-factor", "float", 8.0),
    _value("--rope-type"),
    _switch("--group-query-attention"),
    _switch("--untie-embeddings-and-output-weights"),
    _negative("--disable-bias-linear", "add_bias_linear", field="add_bias_linear"),
    _value("--num-experts", "int", field="num_moe_experts"),
    _switch("--post-self-attn-layernorm"),
    _switch("--post-mlp-layernorm"),
    _switch("--use-gated-attention"),
    _switch("--enable-experimental"),
    Alias("--spec", "spec", "list", None, "str"),
    # fusions and precision
    _negative("--no-rope-fusion", "apply_rope_fusion", field="apply_rope_fusion"),
    _negative("--no-masked-softmax-fusion", "masked_softmax_fusion", field="masked_softmax_fusion"),
    _negative("--no-bias-gelu-fusion", "bias_gelu_fusion", field="bias_activation_fusion"),
    _negative("--no-bias-swiglu-fusion", "bias_swiglu_fusion", field="bias_activation_fusion"),
    _negative("--no-bias-dropout-fusion", "bias_dropout_fusion", field="bias_dropout_fusion"),
    _negative(
        "--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", field="gradient_accumulation_fusion"
    ),
    _negative("--no-persist-layer-norm", "persist_layer_norm", field="persist_layer_norm"),
    _switch("--accumulate-allreduce-grads-in-fp32", field="grad_reduce_in_fp32"),
    _switch("--grad-reduce-in-bf16"),
    _switch("--use-flash-attn"),
    # recompute
    _switch("--recompute-activations"),
    # parallel
    _value("--num-layers-per-virtual-pipeline-stage", "int"),
    _value("--num-virtual-stages-per-pipeline-rank", "int"),
    _value("--decoder-first-pipeline-num-layers", "int", field="num_layers_in_first_pipeline_stage"),
    _value("--decoder-last-pipeline-num-layers", "int", field="num_layers_in_last_pipeline_stage"),
    _negative("--no-overlap-p2p-communication", "overlap_p2p_comm", field="overlap_p2p_comm"),
    _negative("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", field="check_for_nan_in_grad"),
    _negative("--no-align-param-gather", "align_param_gather", field="align_param_gather"),
    _value("--ddp-bucket-size", "int", field="bucket_size"),
    _switch("--ddp-average-in-collective", field="average_in_collective"),
    # optimizer and schedule
    _value("--lr-decay-samples", "int"),
    _value("--lr-warmup-samples", "int"),
    _value("--start-weight-decay", "float"),
    _value("--end-weight-decay", "float"),
    _value("--weight-decay-incr-style", default="constant"),
    _switch("--override-opt_param-scheduler", "override_opt_param_scheduler"),
    _switch("--override-opt-param-scheduler"),
    _switch("--use-checkpoint-opt_param-scheduler", "use_checkpoint_opt_param_scheduler"),
    _switch("--use-checkpoint-opt-param-scheduler"),
    _negative("--no-pin-cpu-grads", "pin_cpu_grads", field="pin_cpu_grads"),
    _negative("--no-pin-cpu-params", "pin_cpu_params", field="pin_cpu_params"),
    # checkpoints and logging
    _switch("--no-save-rng"),
    _switch("--use-dist-ckpt"),
    _switch("--exit-on-missing-checkpoint"),
    _switch("--auto-detect-ckpt-format"),
    _value("--dist-ckpt-strictness"),
    _switch("--ckpt-fully-parallel-load"),
    _negative("--no-ckpt-fully-parallel-save", "ckpt_fully_parallel_save"),
    _value("--log-interval", "int"),
    _value("--train-iters", "int"),
    _value("--tokenizer-type"),
    _value("--tokenizer-model"),
)

ARCHITECTURE = frozenset(
    {
        "add_bias_linear",
        "add_position_embedding",
        "apply_layernorm_1p",
        "attention_output_gate",
        "enable_experimental",
        "group_query_attention",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_group_topk",
        "moe_router_load_balancing_type",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
        "mscale",
        "mscale_all_dim",
        "multi_latent_attention",
        "normalization",
        "padded_vocab_size",
        "position_embedding_type",
        "post_mlp_layernorm",
        "post_self_attn_layernorm",
        "qk_layernorm",
        "quick_geglu",
        "rope_scaling_factor",
        "rope_type",
        "rotary_interleaved",
        "rotary_percent",
        "rotary_scaling_factor",
        "rotary_seq_len_interpolation_factor",
        "seq_length",
        "spec",
        "squared_relu",
        "swiglu",
        "use_gated_attention",
        "use_rope_scaling",
        "use_rotary_position_embeddings",
    }
)
"""Dests that describe the model; FSDP takes all this from the checkpoint's own code and config."""

ASK_SECONDS = 120.0
_MARK = "@@slime "
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}
_PROGRAM = f"""
import argparse, json
from megatron.training.arguments import add_megatron_arguments

parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
said = []
for action in parser._actions:
    if action.dest != "help":
        kind = getattr(action.type, "__name__", "str")
        const = action.const if isinstance(action.const, (bool, int, float, str)) else None
        said.append([action.option_strings, action.dest, action.nargs, const, kind])
print({_MARK!r} + json.dumps(said))
"""


def is_there() -> bool:
    """Whether Megatron-LM can be imported; imports nothing."""
    spec = importlib.util.find_spec("megatron")
    places = (spec.submodule_search_locations or []) if spec else []
    return any((Path(place) / "training" / "arguments.py").is_file() for place in places)


def add_options(parser: argparse.ArgumentParser) -> str | None:
    """Add those of its options that ``parser`` does not have; returns what went wrong, or None."""
    command = [sys.executable, "-c", _PROGRAM]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"Megatron-LM on PYTHONPATH did not say within {ASK_SECONDS:.0f} s which flags it has"
    said = next((line for line in answer.stdout.splitlines() if line.startswith(_MARK)), None)
    if said is None:
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit {answer.returncode}"]
        return f"Megatron-LM on PYTHONPATH could not be asked for its flags: {last[0]}"
    for options, dest, nargs, const, kind in json.loads(said.removeprefix(_MARK)):
        new = [option for option in options if option not in parser._option_string_actions]
        common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if new and nargs == 0:
            parser.add_argument(*new, action="store_const", const=const, **common)
        elif new:
            parser.add_argument(*new, nargs=nargs, type=_TYPES.get(kind, str), **common)
    return None


def installed_core() -> Path | None:
    """The folder that holds the ``megatron`` package of the installed megatron-core distribution.

    None where no distribution lists the files of ``megatron/core``: megatron-core is absent or installed as editable.
    """
    for distribution in importlib.metadata.distributions(name="megatron-core"):
        if "megatron/core/__init__.py" in (distribution.read_text("RECORD") or ""):
            return Path(str(distribution.locate_file(""))).resolve()
    return None


def shadowing_paths() -> list[str]:
    """Entries of ``sys.path`` from which ``megatron.core`` would be imported instead of the installed distribution."""
    installed = installed_core()
    found = []
    is_before = True
    for entry in sys.path if installed else []:
        folder = Path(entry or ".").resolve()
        if folder == installed:
            is_before = False
        elif (folder / "megatron" / "__init__.py").is_file():
            found.append(entry)  # a regular package precedes namespace packages wherever it is on the path
        elif is_before and (folder / "megatron" / "core").is_dir():
            found.append(entry)
    return found


def prefer_installed_core() -> list[str]:
    """Make ``import megatron.core`` find the installed distribution; returns the paths that shadowed it.

    A checkout whose ``megatron`` is a namespace package moves to the end of ``sys.path``, so that ``megatron.training``
    can still be imported from it. One whose ``megatron`` is a regular package is removed.
    """
    shadowing = shadowing_paths()
    for entry in shadowing:
        sys.path.remove(entry)
        if not (Path(entry or ".") / "megatron" / "__init__.py").is_file():
            sys.path.append(entry)
    return shadowing


def shadowing_notice() -> str | None:
    """What the user is told about :func:`shadowing_paths`; None when there are none."""
    paths = shadowing_paths()
    if not paths:
        return None
    version = importlib.metadata.version("megatron-core")
    return (
        f"{', '.join(paths)} on PYTHONPATH has a megatron.core of its own, which is not used: slime is tested with the "
        f"installed megatron-core {version} and imports that one"
    )
