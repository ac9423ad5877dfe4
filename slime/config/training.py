"""Model, numerics and batches of the trainer, and how its weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class ModelConfig:
    _title = "model and trainer"

    hf_checkpoint: str = flag(
        None,
        help="Hugging Face folder or hub id: tokenizer, engines and (FSDP) the model that is trained",
    )
    model_name: str = flag(
        None,
        help="model family for weight names; default: from the checkpoint",
        status="notice",
        reason="FSDP takes names from the checkpoint",
    )
    trust_remote_code: bool = flag(False, help="run model code that comes with the checkpoint")
    train_dtype: str = flag(
        None,
        choices=("float32", "bfloat16"),
        help="default: bfloat16 on CUDA, float32 on the CPU",
    )
    fp16: bool = flag(False, help="train in float16", status="refused", reason="use --train-dtype bfloat16 or float32")
    bf16: bool = flag(False, help="Megatron's name for --train-dtype bfloat16")
    attn_implementation: str = flag(
        None,
        help="attention of the trainer; default: packed, without a mask (varlen on CUDA, its equal on the CPU)",
    )
    gradient_checkpointing: bool = flag(
        False,
        help="recompute activations in the backward pass; --recompute-activations means the same",
    )
    compile_layers: bool = flag(
        None,
        kind="toggle",
        help="compile each decoder layer and the passes over logits (torch.compile); default: on CUDA",
    )
    log_probs_chunk_size: int = flag(
        -1, low=1, off=-1, help="tokens per chunk of logits -> log-prob; -1: chosen for you"
    )
    recompute_loss_function: bool = flag(
        False,
        help="recompute logits in the backward pass",
        status="notice",
        reason="it is always done: logits of a whole batch are never kept",
    )
    share_prompt_in_pack: bool = flag(
        True,
        kind="toggle",
        help="store the prompt of a group once per pack; same gradients, less work",
    )
    skip_zero_advantage_groups: bool = flag(
        True,
        kind="toggle",
        help="no forward and backward pass for groups that cannot move the weights",
    )
    only_train_params_name_list: list[str] | None = flag(None, help="regular expressions: train only these")
    freeze_params_name_list: list[str] | None = flag(None, help="regular expressions: freeze these")
    keep_old_actor: bool = flag(
        False,
        help="keep a copy of the weights that the engines generate with, and compute old log-probs with it; "
        "in train_async.py with an update after every rollout it stays one version behind, as the samples are",
    )
    fsdp_cpu_offload: bool = flag(
        False,
        help="keep FSDP shards in CPU memory",
        status="refused",
        reason="shards stay where they compute; --offload-train moves them out between the trainer's phases",
    )
    fsdp_state_dict_cpu_offload: bool = flag(
        True,
        kind="toggle",
        help="gather state dicts in CPU memory",
        status="notice",
        reason="checkpoints are always written from CPU memory",
    )
    fsdp_cpu_backend: str = flag("gloo", help="backend of CPU collectives", status="notice", reason="it is always gloo")
    deterministic_mode: bool = flag(False, help="Megatron's name for --deterministic")
    custom_model_provider_path: str = flag(
        None,
        kind="hook",
        help="replaces Megatron's model builder",
        status="refused",
        reason="a model needs a weight map, too: add a family in slime/weights/maps",
    )
    qwen_gdn_backend: str = flag(
        "fla",
        choices=("fla", "flashqla"),
        help="gated-delta-net kernels",
        status="refused",
        reason="no kernels for Qwen3-Next layers yet",
    )
    freeze_indexer: bool = flag(
        False, help="freeze DSA indexers", status="refused", reason="there are no DSA models here yet"
    )
    allgather_cp: bool = flag(
        False, help="contiguous context parallel layout", status="refused", reason="it is for DSA models only"
    )
    megatron_config_path: str = flag(
        None, kind="path", help="YAML with other values of flags for a role: actor: {...}, critic: {...}"
    )


@dataclass
class WeightSyncConfig:
    _title = "weight sync"

    update_weights_interval: int = flag(1, low=1, help="sync every N rollouts (train_async.py)")
    update_weight_pause_mode: str = flag(
        None,
        choices=("abort", "retract", "in_place", "drain"),
        help="what an update does to requests under way. abort: end them, the rollout goes on with their tokens; "
        "retract: compute their cache again; in_place: keep the cache of the old weights; drain: start no more and "
        "let them finish first, so that no sample mixes weights; default: retract where the engine can, else abort",
    )
    update_weight_mode: str = flag(
        "full",
        choices=("full", "delta"),
        help="all weights or changed bytes only",
    )
    update_weight_transport: str = flag(
        "nccl",
        choices=("nccl", "disk"),
        help="nccl: from process to process (shared memory or IPC on one host, else NCCL or gloo); disk: by files",
    )
    update_weight_buffer_size: int = flag(512 * 2**20, low=1, help="bytes per bucket")
    update_weight_disk_dir: str = flag(None, help="shared folder for the disk transport")
    update_weight_disk_keep_files: bool = flag(False, help="keep published weights")
    update_weight_delta_encoding: str = flag(
        "xor",
        choices=("xor", "overwrite"),
        help="a changed byte travels as old xor new, or as it is now",
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128",
        choices=("xxh3-128", "blake3", "adler32"),
        help="digest per tensor of a delta",
        limits={"blake3": ("refused", "xxh3-128 finds the same damage in less time")},
    )
    update_weight_local_checkpoint_dir: str = flag(
        None,
        help="folder on each host that deltas patch",
        status="notice",
        reason="each engine keeps what deltas patch in memory and needs no folder",
    )
    custom_update_weight_post_write_path: str = flag(
        None,
        kind="hook",
        help="fn(args, version_dir, engines) on the sending rank, after files are written and before engines read them",
    )
    release_train: bool = flag(
        False,
        help="end trainer processes during rollout",
        status="refused",
        reason="--offload-train gives their memory back, and nothing has to be loaded again",
    )
    audit_weights: bool = flag(
        True,
        kind="toggle",
        help="after each sync compare what engine and trainer hold",
    )
    audit_threshold: float = flag(None, low=0, help="largest log-prob difference an audit accepts; default: by dtype")
    check_weight_update_equal: bool = flag(
        None,
        kind="toggle",
        help="once, at the first update: let the engines overwrite their weights, send the same ones again, compare: "
        "all were written; default: with SGLang, where weights go from process to process",
    )
    rollout_data_transport: str = flag(
        "object-store",
        choices=("object-store", "nixl"),
        help="how the trainer fetches rollouts",
        limits={"nixl": ("refused", "Ray's object store carries the batches")},
    )


@dataclass
class BatchConfig:
    _title = "batches"

    rollout_batch_size: int = flag(32, low=1, help="prompts per rollout")
    n_samples_per_prompt: int = flag(8, low=1, help="samples per prompt: the group; with --loss-type sft_loss 1")
    global_batch_size: int = flag(
        None,
        low=1,
        help="samples per optimizer step; default: rollout batch x samples / steps",
    )
    num_steps_per_rollout: int = flag(None, low=1, help="optimizer steps per rollout; default 1")
    micro_batch_size: int = flag(1, low=1, help="samples per micro-batch; turns --use-dynamic-batch-size off")
    use_dynamic_batch_size: bool = flag(
        None,
        kind="toggle",
        help="fill micro-batches up to --max-tokens-per-gpu; default: unless --micro-batch-size is given or batches "
        "are padded (--attn-implementation)",
    )
    max_tokens_per_gpu: int = flag(
        None,
        low=1,
        help="token budget of a micro-batch on one GPU; default: the longest prompt and response that the flags "
        "allow, at least 4096",
    )
    log_probs_max_tokens_per_gpu: int = flag(
        None,
        low=1,
        help="token budget of log-prob passes",
        status="notice",
        reason="log-probs use the micro-batches of training",
    )
    balance_data: bool = flag(
        None,
        kind="toggle",
        help="pack micro-batches so that all ranks have the same work in each (estimated FLOPs); default: with "
        "--use-dynamic-batch-size",
    )
    balance_by_flops: bool = flag(False, help="the same as --balance-data, with --use-dynamic-batch-size")
    data_pad_size_multiplier: int = flag(128, low=1, help="packs are padded to a multiple of this")
