"""MODEL_ARGS against the checkpoint, and Megatron flags that FSDP can or cannot honour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.hf_config import media_token_ids, read_config
from slime.config.layout import ParallelLayout
from slime.config.megatron_flags import check_megatron
from slime.config.megatron_names import ARCHITECTURE
from slime.config.passthrough import by_name

SHAPE: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta",),
    "vocab_size": ("vocab_size",),
    "add_qkv_bias": ("attention_bias",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Megatron's name of a dimension -> where config.json may have it."""

REFUSED_ABOVE_ONE = {
    "tensor_model_parallel_size": "tensor parallel",
    "pipeline_model_parallel_size": "pipeline parallel",
    "virtual_pipeline_model_parallel_size": "interleaved pipelines",
    "expert_model_parallel_size": "expert parallel",
    "expert_tensor_parallel_size": "expert tensor parallel",
}
MEGATRON_HOOKS = (
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)
UNDERSTOOD = {"recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers"}
DROPOUTS = ("attention_dropout", "hidden_dropout")


def check_shape(args: Args) -> list[str]:
    """Every difference between the shape flags and config.json, named."""
    return [
        f"{difference}: source the model script of this checkpoint, or leave the flag out"
        for difference in _differences(args)
    ]


def check_media(args: Args) -> list[str]:
    """Images for a model that can see them."""
    folder = Path(args.hf_checkpoint or "").expanduser()
    if not args.multimodal_keys or not folder.is_dir() or media_token_ids(args.hf_checkpoint):
        return []
    if any((folder / f"{name}_config.json").is_file() for name in ("preprocessor", "processor")):
        return []
    return [
        f"--multimodal-keys: {args.hf_checkpoint} is a text model (no image token in its config.json, no "
        "preprocessor_config.json); take a vision-language model, or leave the flag out"
    ]


def drop_other_model(args: Args) -> None:
    """An override that names a checkpoint scales the model: MODEL_ARGS of another one give way to its config.json."""
    differences = _differences(args) if _names_checkpoint(args) else []
    if not differences:
        return
    args.notices.append(
        f"MODEL_ARGS describe another model than the override's hf_checkpoint ({len(differences)} differences): "
        "its own config.json is used"
    )
    for name in (*SHAPE, *ARCHITECTURE, "untie_embeddings_and_output_weights"):
        args.megatron.pop(name, None)


def _differences(args: Args) -> list[str]:
    given = {name: args.megatron[name] for name in SHAPE if name in args.megatron}
    config = read_config(args.hf_checkpoint) if args.hf_checkpoint else None
    if config is None or not given:
        return []
    differences = [
        f"--{name.replace('_', '-')} {value}, but config.json of {args.hf_checkpoint} has {key} {config_value}"
        for name, value in given.items()
        for key, config_value in [_lookup(config, name)]
        if config_value is not None and not _same(value, config_value)
    ]
    return differences + _tied(args, config)


def _names_checkpoint(args: Args) -> bool:
    from slime.config.overrides import read_yaml

    return any(key.replace("-", "_") == "hf_checkpoint" for key in map(str, read_yaml(args.override, "--override")[0]))


def _lookup(config: dict[str, Any], name: str) -> tuple[str, Any]:
    for key in SHAPE[name]:
        if config.get(key) is not None:
            return key, config[key]
    if name == "kv_channels" and config.get("hidden_size") and config.get("num_attention_heads"):
        return "hidden_size / num_attention_heads", config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters")
    if name == "rotary_base" and isinstance(rope, dict):
        return "rope_parameters.rope_theta", rope.get("rope_theta")
    return SHAPE[name][0], None


def _same(flag: Any, config: Any) -> bool:
    if isinstance(flag, (int, float)) and isinstance(config, (int, float)):
        return abs(float(flag) - float(config)) <= 1e-9 * max(abs(float(config)), 1e-30) or float(flag) == float(config)
    return bool(flag == config)


def _tied(args: Args, config: dict[str, Any]) -> list[str]:
    tied = config.get("tie_word_embeddings")
    if tied is None or "num_layers" not in args.megatron:
        return []
    untied = bool(args.megatron.get("untie_embeddings_and_output_weights", False))
    if untied != bool(tied):
        return []
    has = "has --untie-embeddings-and-output-weights" if untied else "lacks --untie-embeddings-and-output-weights"
    return [f"MODEL_ARGS {has}, but config.json of {args.hf_checkpoint} has tie_word_embeddings {tied}"]


def check_fsdp(args: Args) -> list[str]:
    """With FSDP: parallel flags it cannot honour are refused, the rest is named in one notice."""
    if args.train_backend != "fsdp":
        return []
    problems = []
    for name, words in REFUSED_ABOVE_ONE.items():
        size = args.megatron.get(name)
        if size is not None and size > 1:
            why = "only the Megatron backend has it"
            problems.append(f"--{name.replace('_', '-')} {size}: --train-backend fsdp has no {words} ({why}); use 1")
    problems += [
        f"--{name.replace('_', '-')}: only --train-backend megatron calls it; leave it out"
        for name in MEGATRON_HOOKS
        if getattr(args, name)
    ]
    if args.ckpt_format == "torch":
        args.notices.append("--ckpt-format torch is Megatron's: snapshots of --train-backend fsdp have one format")
    if args.use_routing_replay:
        problems.append("--use-routing-replay: --train-backend fsdp does not replay routing; leave it out")
    layout = ParallelLayout.from_args(args)
    if layout.cp > 1:
        cut = args.rollout_backend == "embedded" and (args.rollout_top_p < 1 or args.rollout_top_k > 0)
        alone = {
            f"--attn-implementation {args.attn_implementation}": args.attn_implementation not in (None, "varlen"),
            "--rollout-top-p below 1 or --rollout-top-k": cut,
            "--multimodal-keys": args.multimodal_keys,
        }
        problems += [f"{flag} has no --context-parallel-size: drop one" for flag, given in alone.items() if given]
    problems += layout.problems()
    known = set(SHAPE) | ARCHITECTURE | UNDERSTOOD | set(REFUSED_ABOVE_ONE) | {"context_parallel_size"}
    known |= {"untie_embeddings_and_output_weights"}
    idle = [name for name, value in args.megatron.items() if name not in known and not _is_idle(name, value)]
    if idle:
        shown = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
        args.notices.append(f"Megatron flags without effect on --train-backend fsdp: {shown}")
    return problems


def _is_idle(name: str, value: Any) -> bool:
    """A flag at the value that FSDP has anyway needs no notice."""
    if name in DROPOUTS:
        return bool(value == 0)
    return bool(value == by_name("megatron")[name].flag.default)


MODEL_RULES = (check_shape, check_media, check_fsdp, check_megatron)
