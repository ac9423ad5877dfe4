"""Megatron's flags on both backends: which ones are read, which ones have no effect, and which ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.config.hf_config import SHAPE
from slime.config.layout import chunk_problems
from slime.config.megatron_lm import shadowing_notice
from slime.config.passthrough import MEGATRON_VERSION, by_name, load_table

if TYPE_CHECKING:
    from slime.config.args import Args

READ_BY_SLIME = frozenset(
    """vocab_size padded_vocab_size make_vocab_size_divisible_by max_position_embeddings seq_length
    position_embedding_type use_rotary_position_embeddings rotary_base rotary_percent rotary_scaling_factor
    use_rope_scaling rope_scaling_factor rope_type group_query_attention untie_embeddings_and_output_weights
    add_position_embedding post_self_attn_layernorm post_mlp_layernorm moe_layer_freq
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    virtual_pipeline_model_parallel_size recompute_activations start_weight_decay end_weight_decay
    weight_decay_incr_style accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 use_distributed_optimizer
    swiglu quick_geglu use_gated_attention spec optimizer_cpu_offload optimizer_offload_fraction""".split()  # noqa: SIM905
)
"""Flags that the Megatron backend reads itself, or that repeat values of config.json."""


ARCHITECTURE = frozenset(
    """add_bias_linear add_position_embedding apply_layernorm_1p attention_output_gate enable_experimental
    group_query_attention make_vocab_size_divisible_by max_position_embeddings moe_layer_freq
    moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
    moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_intermediate_size mscale mscale_all_dim multi_latent_attention normalization
    padded_vocab_size position_embedding_type post_mlp_layernorm post_self_attn_layernorm qk_layernorm
    quick_geglu rope_scaling_factor rope_type rotary_interleaved rotary_percent rotary_scaling_factor
    rotary_seq_len_interpolation_factor seq_length spec squared_relu swiglu use_gated_attention use_rope_scaling
    use_rotary_position_embeddings""".split()  # noqa: SIM905
)
"""Flags that describe the model. FSDP takes all of this from the checkpoint's code and config.json."""


WITHOUT_EFFECT = frozenset(
    """apply_rope_fusion masked_softmax_fusion persist_layer_norm gradient_accumulation_fusion moe_permute_fusion
    moe_grouped_gemm attention_softmax_in_fp32 attention_backend use_flash_attn moe_use_legacy_grouped_gemm
    moe_token_drop_policy variable_seq_lengths bf16 log_interval tokenizer_type tokenizer_model use_dist_ckpt
    auto_detect_ckpt_format exit_on_missing_checkpoint dist_ckpt_strictness train_iters use_cpu_initialization
    perform_initialization check_for_nan_in_grad calculate_per_token_loss moe_router_load_balancing_type
    moe_token_dispatcher_type cp_comm_type async_tensor_model_parallel_allreduce deterministic_mode
    bias_activation_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion no_save_rng
    ckpt_fully_parallel_load ckpt_fully_parallel_save override_opt_param_scheduler align_param_gather
    overlap_param_gather_with_optimizer_step
    use_checkpoint_opt_param_scheduler check_for_nan_in_loss_and_grad pin_cpu_grads pin_cpu_params
    mtp_num_layers mtp_loss_scaling_factor mtp_standalone
    overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload""".split()  # noqa: SIM905
)
"""Flags that choose between equivalent kernels, or that concern what slime decides itself. The results do not depend on
them."""


_NO_GRAPHS = "packs vary in shape, so there are no CUDA graphs"
PERFORMANCE: dict[str, str] = {
    "tp_comm_overlap": "tensor-parallel ranks exchange rows before and after the products of matrices",
    "use_precision_aware_optimizer": "Adam's moments and the main weights are kept in float32",
    **dict.fromkeys(("moe_enable_deepep", "moe_flex_dispatcher_backend"), "tokens go to experts by all-to-all"),
    **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _NO_GRAPHS),
}
"""Flags that change speed or memory and no result, and what the Megatron backend does instead. A notice says so."""


_NO_TE = "it needs Transformer Engine"


_NO_MAP = "no model family with a weight map has it"


REFUSED: dict[str, str] = {
    **dict.fromkeys(("fp8", "fp4", "fp8_param", "fp4_param", "moe_latent_size"), _NO_TE),
    **dict.fromkeys(("squared_relu", "experimental_attention_variant"), _NO_MAP),
    "use_kitchen": "it needs NVIDIA's kitchen package",
    "cpu_offloading": f"{_NO_TE}: use --recompute-granularity full or --optimizer-cpu-offload",
    "use_megatron_fsdp": "use --train-backend fsdp",
    "hidden_dropout": "dropout in a policy update makes the importance ratios wrong: use 0",
    "attention_dropout": "dropout in a policy update makes the importance ratios wrong: use 0",
    "moe_aux_loss_coeff": "the RL loss has no load-balancing term: use 0",
    "moe_z_loss_coeff": "the RL loss has no z-loss term: use 0",
    "moe_input_jitter_eps": "it makes log-probs random: leave it out",
    "moe_expert_capacity_factor": "dropped tokens make log-probs wrong: leave it out",
    "average_in_collective": "slime sums gradients: leave it out",
    "lr_decay_samples": "use --lr-decay-iters",
    "lr_warmup_samples": "use --lr-warmup-iters",
    "rotary_seq_len_interpolation_factor": _NO_MAP,
}
"""Flags that the Megatron backend cannot support, with the reasons."""


BUILT_IN_SPECS = (
    *("glm4", "get_glm_spec", "slime_plugins.models.glm4"),
    *("slime_plugins.models.minimax_m2", "get_minimax_m2_layer_spec"),
    *("slime_plugins.models.qwen3_next", "get_qwen3_next_spec"),
    *("slime_plugins.models.qwen3_5", "get_qwen3_5_spec"),
)
"""Values that ``--spec`` accepts. They have no effect, because the layers follow from config.json."""


def fields_by_dest() -> dict[str, str]:
    """Map attributes of Megatron-LM to config fields of megatron-core where the names differ."""
    table = load_table("megatron_lm", MEGATRON_VERSION)
    return {entry["dest"]: entry["field"] for entry in table.values() if "field" in entry}


def idle_megatron_flags(given: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the given flags of :data:`PERFORMANCE`, each with what happens instead."""
    return [
        (f"--{name.replace('_', '-')}", instead)
        for name, instead in PERFORMANCE.items()
        if given.get(name) not in (None, False, "none")
    ]


def refused_flags(given: dict[str, Any]) -> list[str]:
    """Report given flags that the Megatron backend cannot support or does not read."""
    problems = [
        f"--{name.replace('_', '-')} {given[name]} is not supported by --train-backend megatron: {why}"
        for name, why in REFUSED.items()
        if given.get(name) not in (None, False, 0, 0.0, "none")
    ]
    other = [name for name in given.get("spec") or [] if name not in BUILT_IN_SPECS]
    if other:
        problems.append(f"--spec {' '.join(other)}: slime supports only its built-in layers; leave it out")
    known = READ_BY_SLIME | WITHOUT_EFFECT | set(PERFORMANCE) | set(REFUSED) | set(fields_by_dest())
    known |= set(load_table("megatron_core", MEGATRON_VERSION))
    problems += [
        f"--{name.replace('_', '-')}: --train-backend megatron does not read it; leave it out"
        for name in given
        if name not in known
    ]
    return problems


def check_megatron(args: Args) -> list[str]:
    """Check the flags of Megatron for its backend: those that do not fit, and those that it cannot support. A notice
    names a checkout of Megatron-LM whose ``megatron.core`` is not used."""
    if args.train_backend != "megatron":
        return []
    if notice := shadowing_notice():
        args.notices.append(notice)
    return chunk_problems(args.megatron, args.hf_checkpoint) + refused_flags(args.megatron)


UNDERSTOOD = {
    *("recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    "grad_reduce_in_bf16",
    "context_parallel_size",
    *(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model")),
    "expert_tensor_parallel_size",  # above 1, the rules refuse these
}


DROPOUTS = ("attention_dropout", "hidden_dropout")


def check_fsdp(args: Args) -> list[str]:
    """Check the number of shards, and name Megatron's flags that have no effect in one notice."""
    if args.train_backend != "fsdp":
        return []
    known = set(SHAPE) | ARCHITECTURE | UNDERSTOOD
    known |= {"untie_embeddings_and_output_weights"}
    idle = [name for name, value in args.megatron.items() if name not in known and not _is_idle(name, value)]
    if idle:
        shown = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
        args.notices.append(f"these Megatron flags have no effect with --train-backend fsdp: {shown}")
    return _shard_size(args)


def _shard_size(args: Args) -> list[str]:
    size, ranks = args.fsdp_shard_size, args.world_size
    if size is None or size < 1 or ranks % size == 0:  # the range check reports a size below 1
        return []
    sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    return [f"--fsdp-shard-size {size} does not divide the {ranks} training ranks: use one of {sizes}, or leave it out"]


def _is_idle(name: str, value: object) -> bool:
    """Whether a flag has the value that FSDP uses anyway, so that it needs no notice."""
    if name in DROPOUTS:
        return bool(value == 0)
    return bool(value == by_name("megatron")[name].flag.default)
