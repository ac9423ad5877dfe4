"""The flags ``--vllm-…``, and what of a run vLLM cannot serve. Nothing here imports vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hf_config import read_config
from slime.config.passthrough import ProgramOptions
from slime.engines.sglang_api import Capabilities

if TYPE_CHECKING:
    from slime.config.args import Args

SUPPORTED = Capabilities(
    seeded_sampling=True,
    version_spans=True,
    release_while_busy=True,
    retract=True,
    update_brackets=True,
    weight_comparison=True,
    flat_broadcast=True,
    plain_handles=True,
    adapter_cache_keys=True,
)
"""What the engine supports; ``named_checksums`` and ``named_adapters`` depend on model and options,
and ``deterministic`` is not there: a result depends on the rest of the batch.
"""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters for which vLLM can make room."""
_SIZE = "use --rollout-num-gpus-per-engine"
_PARALLEL = "an engine of slime is one group of tensor-parallel ranks on one node"
VLLM = ProgramOptions(
    (Path(__file__).with_name("options.json"),),
    {
        "set by slime": {
            "model": "it follows from --hf-checkpoint",
            "tokenizer": "it follows from --hf-checkpoint",
            "tensor_parallel_size": _SIZE,
            "seed": "use --rollout-seed",
            "dtype": "use --rollout-dtype",
            "trust_remote_code": "use --trust-remote-code",
            "enable_sleep_mode": "it follows from --offload-rollout",
            "logprobs_mode": "it follows from the sampling flags of the run",
            "worker_extension_cls": "slime needs its own to update weights",
        },
        "not supported": {
            "nnodes": _PARALLEL,
            "node_rank": _PARALLEL,
            "pipeline_parallel_size": _PARALLEL,
            "data_parallel_size": _PARALLEL,
            "kv_transfer_config": "prefill and decode servers have not been run with slime",
            "quantization": "updates of quantized weights have not been run with slime",
            "speculative_config": "updates of a draft model have not been run with slime",
            "skip_tokenizer_init": "stop strings need the tokenizer",
        },
    },
    context_length="max_model_len",
)


def check(args: Args) -> list[str]:
    """Return what of a run with ``--rollout-backend vllm`` cannot work, each with a reason."""
    if args.rollout_backend != "vllm" or args.rollout_external_engine_addrs:
        return []
    config = read_config(str(args.hf_checkpoint)) or {}
    cuts = args.rollout_top_p != 1.0 or args.rollout_top_k not in (-1, 0)
    refused = {
        "--prefill-num-servers": (
            args.prefill_num_servers,
            "prefill and decode servers have not been run with vLLM",
        ),
        "--sglang-config": (args.sglang_config, "it describes servers of SGLang"),
        "--use-rollout-routing-replay": (
            args.use_rollout_routing_replay,
            "the routes of vLLM's experts are not read",
        ),
        "--rollout-quantization": (
            args.rollout_quantization,
            "updates of quantized weights have not been run with vLLM",
        ),
        "--update-weight-mode delta": (
            args.update_weight_mode == "delta",
            "vLLM has no loader for deltas; use full",
        ),
        "--lora-sync adapter": (
            args.lora_sync == "adapter" and args.lora_rank > RANKS[-1],
            f"vLLM loads adapters of rank {RANKS[-1]} and less; use merged",
        ),
        "--colocate with several GPUs per engine": (
            args.colocate and args.rollout_num_gpus_per_engine > 1,
            "a CUDA handle can be opened by one rank only; use one GPU per engine",
        ),
        "--rollout-temperature with --rollout-top-p or --rollout-top-k": (
            cuts and args.rollout_temperature != 1.0,
            "vLLM gives log-probs of the whole vocabulary at temperature 1 only",
        ),
        "--hf-checkpoint": (
            "vision_config" in config or "audio_config" in config,
            "images and audio have not been run with vLLM",
        ),
    }
    return [
        f"{flag} with --rollout-backend vllm: {reason}"
        for flag, (given, reason) in refused.items()
        if given
    ]
