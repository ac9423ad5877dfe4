"""Flags of the trained model: its checkpoints, numerics, optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slime.config.files import regular_expression
from slime.config.flag import Section, flag, path_flag
from slime.config.hf_config import (
    is_hf_folder,
    looks_like_hub_id,
    media_token_ids,
    megatron_folder,
)
from slime.config.machine import installed
from slime.config.run import other_folder

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.rules import Run


@dataclass
class ModelConfig(Section):
    _title = "model and trainer"

    hf_checkpoint: str = flag(kind="path")
    """Hugging Face folder or hub id: tokenizer, the engines' weights and, with FSDP, the model to
    train. Default:
    --ref-load or --load if that is a Hugging Face folder"""
    model_name: str | None = None
    """Megatron: model family that determines the names of weights, for a model_type that has no map
    of its own. Default: the model_type of config.json"""
    trust_remote_code: bool = False
    """Allow running Python code that is part of the checkpoint"""
    train_dtype: Literal["float32", "bfloat16", "float16"] = flag()
    """Data type of the trainer's computation. Default: bfloat16 on CUDA, float32 on the CPU"""
    bf16: bool = False
    """Megatron's spelling of --train-dtype bfloat16"""
    fp16: bool = False
    """Megatron's spelling of --train-dtype float16, which scales the loss; FSDP only"""
    attn_implementation: str | None = None
    """Attention implementation of the trainer, by its name in transformers; all but varlen, torch's
    kernel for packs, train padded batches. Default: FlashAttention 4 where flash-attn-4 is installed
    on Hopper or newer, else varlen, with an equivalent for the CPU"""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory; --recompute-activations is a
    synonym
    """
    compile_layers: bool = flag()
    """Compile layers and logits with torch.compile. Default: on with CUDA and Triton"""
    log_probs_chunk_size: int = flag(-1, low=1, off=-1)
    """Tokens per chunk when log-probs are computed from logits; -1: automatic"""
    share_prompt_in_pack: bool = True
    """Store what samples of a group begin with once per pack: the same gradients in less time"""
    skip_zero_advantage_groups: bool = True
    """Skip forward and backward passes of groups whose advantages are all 0"""
    only_train_params_name_list: list[str] | None = flag(valid=regular_expression)
    """Regular expressions of parameter names; only matching parameters are trained. Default: all"""
    freeze_params_name_list: list[str] | None = flag(valid=regular_expression)
    """Regular expressions of parameter names; matching parameters are not trained"""
    keep_old_actor: bool = False
    """Compute the old log-probs with a copy of the weights that generated the samples. Refused in
    train_async.py if samples can come from several weight versions"""
    fsdp_shard_size: int | None = flag(low=1)
    """FSDP: number of neighbouring ranks over which parameters, gradients and optimizer state are
    sharded; it must divide the training ranks. Each such group holds a replica of the model.
    Default: all training ranks"""
    fsdp_expert_parallel_size: int = flag(1, low=1)
    """FSDP: number of neighbouring ranks among which the experts of each layer are divided, with
    tokens sent to the ranks of their experts; it must divide --fsdp-shard-size. The other weights
    are sharded as ever. 1: experts are gathered like all weights"""
    context_parallel_kind: Literal["gather", "ulysses"] = "gather"
    """FSDP: how the ranks of --context-parallel-size, which divide the tokens of each sample, compute
    attention. gather: each has its queries and the keys and values of all. ulysses: they exchange
    tokens for heads, so that each has all tokens of its share of the heads"""
    fsdp_reshard_after_forward: bool = True
    """FSDP: free a layer's gathered parameters after its forward pass.
    --no-fsdp-reshard-after-forward keeps them for a whole optimizer step, for models that fit on
    every rank in --train-dtype"""
    fsdp_accumulate_unsharded_gradients: bool = False
    """FSDP: reduce gradients once per optimizer step instead of after every micro-batch, for 4
    bytes of memory per trained parameter"""
    deterministic_mode: bool = False
    """Megatron's spelling of --deterministic"""
    megatron_config_path: str | None = path_flag()
    """YAML file with flag values for one role, under the keys actor and critic"""


def derive_model(run: Run) -> None:
    args = run.args
    machine = run.machine
    # Launch scripts often name the model only once.
    for name in "ref_load", "load":
        folder = getattr(args, name)
        if args.hf_checkpoint is None and is_hf_folder(folder):
            args.hf_checkpoint = folder
            args.notices.append(
                f"--hf-checkpoint is not given: --{name.replace('_', '-')} {folder} is used"
            )
    # On the CPU, determinism costs 2-3% of a decode step with 8 or more running requests (17% with
    # only one). A partial rollout cannot be deterministic: which samples it continues depends on
    # timing.
    on_cpu = (
        args.embedded_device == "cpu" and args.rollout_backend == "embedded" and not machine.cuda
    )
    asked = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    args.fill(
        deterministic=args.deterministic_mode or (on_cpu and not args.partial_rollout),
        train_dtype=asked or ("bfloat16" if machine.cuda else "float32"),
        # torchao's tensors are not compiled.
        compile_layers=machine.cuda and installed("triton") and args.lora_base_quantization is None,
        lr_warmup_fraction=args.warmup_ratio,
    )
    if not args.lr_warmup_fraction:  # which is that of both roles
        args.fill(critic_lr_warmup_iters=args.lr_warmup_iters)


def check_checkpoint(model: ModelConfig) -> list[str]:
    if model.hf_checkpoint is None:
        return [
            "--hf-checkpoint is missing: pass a Hugging Face folder or hub id with the weights "
            "and the tokenizer (MODEL_ARGS describe only the shape of the model)"
        ]
    return _hf_problem("--hf-checkpoint", model.hf_checkpoint)


def _hf_problem(option: str, name: str) -> list[str]:
    folder = Path(name).expanduser()
    if is_hf_folder(name) or (not folder.exists() and looks_like_hub_id(name)):
        return []
    why = "no such folder, and the name does not have the form of a hub id (owner/model)"
    if (folder / "adapter_config.json").is_file():
        why = (
            "the folder has an adapter and no model: pass the model on which it was trained, and "
            f"--load {name} to go on with the adapter (slime merge-lora makes one model of both)"
        )
    elif folder.is_dir():
        why = (
            "no config.json is there: pass a Hugging Face folder, and --load for snapshots of a "
            "run and checkpoints of Megatron-LM (torch_dist: .metadata and *.distcp)"
        )
    return [f"{option} {name}: {why}"]


def check_reference(args: Args) -> list[str]:
    """Check ``--ref-load``. If nothing is trained with the reference model, a folder that cannot be
    read is replaced by ``--hf-checkpoint``, of which a folder ``X_torch_dist`` is usually the
    conversion."""
    if other_folder(args.ref_load, args.ref_ckpt_step):
        return []
    if args.ref_ckpt_step is not None:
        return [
            f"--ref-ckpt-step {args.ref_ckpt_step}: --ref-load {args.ref_load} has no such "
            "iteration of Megatron-LM"
        ]
    if args.ref_load is None or args.ref_load == args.hf_checkpoint:
        return []
    if args.train_backend == "megatron" and megatron_folder(args.ref_load):
        return []
    problems = _hf_problem("--ref-load", args.ref_load)
    if not problems:
        return []
    # A launch script may name a conversion that only its own framework can read. It matters only if
    # it is used.
    if args.kl_coef == 0 and (args.kl_loss_coef == 0 or not args.use_kl_loss):
        args.notices.append(
            f"{problems[0]}. No KL term is trained with it, so it is ignored: initial weights and "
            f"reference model are those of --hf-checkpoint {args.hf_checkpoint}"
        )
        args.ref_load = args.hf_checkpoint
        return []
    return [
        f"{problem}; the KL term needs it (without --ref-load, it uses --hf-checkpoint)"
        for problem in problems
    ]


def check_teacher(teacher: str | None, backend: str) -> list[str]:
    if not teacher or other_folder(teacher) or (backend == "megatron" and megatron_folder(teacher)):
        return []
    return _hf_problem("--opd-teacher-load", teacher)


def check_media(checkpoint: str | None) -> list[str]:
    """Check that the model of ``--multimodal-keys`` can process images, video or audio."""
    folder = Path(checkpoint or "").expanduser()
    if not folder.is_dir() or media_token_ids(checkpoint):
        return []
    if any((folder / f"{name}_config.json").is_file() for name in ("preprocessor", "processor")):
        return []
    return [
        f"--multimodal-keys: {checkpoint} is a text model (no image token in its "
        "config.json, no preprocessor_config.json); use a vision-language model, or leave the "
        "flag out"
    ]


@dataclass
class OptimizerConfig(Section):
    _title = "optimizer and schedule"

    optimizer: str = flag("adam", kind_of_part="optimizer")
    """Optimizer: adam is AdamW; muon (FSDP) updates the matrices of layers by orthogonal ones, and
    the rest by AdamW"""
    lr: float = flag(1e-6, low=0)
    """Peak learning rate"""
    min_lr: float = flag(0.0, low=0)
    """Learning rate at the end of the decay"""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """Shape of the learning-rate decay"""
    lr_decay_iters: int | None = flag(low=1)
    """Number of optimizer steps of the learning-rate decay. Default: all steps of the run"""
    lr_warmup_iters: int = flag(0, low=0)
    """Number of optimizer steps of linear learning-rate warm-up"""
    lr_warmup_fraction: float | None = flag(low=0, high=1)
    """Length of the warm-up as a fraction of --lr-decay-iters. Default: --lr-warmup-iters"""
    lr_warmup_init: float = flag(0.0, low=0)
    """Learning rate at the start of the warm-up"""
    lr_wsd_decay_iters: int | None = flag(low=0)
    """Number of optimizer steps of the final decay with --lr-decay-style WSD, which needs it"""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay with --lr-decay-style WSD"""
    warmup_ratio: float | None = flag(low=0, high=1)
    """Former name of --lr-warmup-fraction"""
    weight_decay: float = flag(0.0, low=0)
    """Coefficient of decoupled weight decay"""
    adam_beta1: float = flag(0.9, low=0)
    """Adam's beta1, the decay rate of the first moment"""
    adam_beta2: float = flag(0.95, low=0)
    """Adam's beta2, the decay rate of the second moment"""
    adam_eps: float = flag(1e-8, above=0)
    """Adam's epsilon, which is added to the denominator"""
    clip_grad: float = flag(1.0, low=0)
    """Maximum norm of the gradient; 0 disables clipping"""
    critic_lr: float = flag(low=0, same_as="lr")
    """Peak learning rate of the critic. Default: --lr"""
    critic_lr_warmup_iters: int = flag(low=0)
    """Optimizer steps of the critic's warm-up. Default: --lr-warmup-iters, or the same fraction"""
    reset_optimizer_states: bool = False
    """Reset Adam's moments at the start of each rollout's steps"""
    use_stateless_adam: bool = False
    """Use Adam without moments: each step is nearly the learning rate times the gradient's sign"""


@dataclass
class RolloutPrecisionConfig(Section):
    _title = "precision of the engines"

    rollout_quantization: Literal["fp8"] | None = None
    """Quantize the weights of the engines. fp8: the projections of attention, MLP and experts are
    8-bit floats (E4M3). Turns on --use-tis"""
    rollout_quantization_scale: Literal["block", "channel", "tensor"] = "block"
    """What shares a scale with --rollout-quantization fp8: blocks of 128 x 128 weights, the weights
    of an output channel, or the whole tensor. SGLang can update only block"""


@dataclass
class TrainingPrecisionConfig(Section):
    _title = "precision and memory of the trainer"

    loss_scale: float | None = flag(above=0)
    """Constant scale of the loss in float16. Default: it follows the overflows of gradients"""
    initial_loss_scale: float = flag(65536.0, above=0)
    """Scale of the loss in float16 at the start of a run"""
    min_loss_scale: float = flag(1.0, above=0)
    """Smallest scale of the loss in float16"""
    loss_scale_window: int = flag(1000, low=1)
    """Optimizer steps without an overflow after which the scale of the loss in float16 is
    doubled
    """
    float8_training: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """FSDP on CUDA: compute the linear layers of the decoder layers with 8-bit floats of torchao,
    with one scale per tensor or row (rowwise_with_gw_hp: gradients of weights in bfloat16)"""
    optimizer_8bit: bool = False
    """FSDP: keep Adam's moments in 8 bits (torchao): 2 instead of 8 bytes per parameter"""
    bf16_master_weights: bool = False
    """FSDP: keep master weights and gradients in bfloat16 and round updates stochastically
    (torchao): 4 instead of 8 bytes per parameter. Needs --train-dtype bfloat16"""
    offload_activations: bool = False
    """FSDP: keep the inputs of layers in CPU memory until the backward pass recomputes their
    activations; implies --gradient-checkpointing"""
    fsdp_cpu_offload: bool = False
    """FSDP on CUDA: keep master weights, gradients and optimizer in CPU memory, and run the
    optimizer there
    """
