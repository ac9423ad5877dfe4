"""Start the server of one vLLM engine: its command line and its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slime.config.machine import this_machine
from slime.config.passthrough import command_line
from slime.config.process import module_command
from slime.engines.keys import send_key
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import EngineProcess, free_port, without_proxy
from slime.plugins.vllm.options import RANKS

ON_CPU: dict[str, object] = {
    "enforce_eager": True,  # compiling takes minutes
    "kv_cache_memory_bytes": 2**30,  # vLLM's default is most of the memory
}


def start(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str,
    log_path: str | Path | None,
    gpu_ids: Sequence[int] | None,
    node: tuple[int, int, str | None],
) -> EngineProcess:
    """Start the engine of ``spec``; see :func:`slime.engines.launch.start_engine`."""
    port = free_port(host)
    options = {"host": host, "port": port, **server_options(settings, spec)}
    # The guard ends the server with this process, also if this process is killed.
    command = [*module_command("slime.engines.guard"), "--parent", str(os.getpid()), "--"]
    command += module_command("slime.plugins.vllm.server")
    command += command_line("vllm", options)
    # Keys and GPUs are in the environment, which other users cannot read.
    env = {**without_proxy(spec.model_path, host), **settings.keys.environment()}
    env |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    env["VLLM_NO_USAGE_STATS"] = "1"  # it would tell its makers about each start
    if on_cpu() or settings.threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(settings.threads or 1)
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # all engines would take the first cores
    if on_cpu() and options["enforce_eager"]:
        env["TORCHDYNAMO_DISABLE"] = (
            "1"  # vLLM compiles a few functions all the same, for 15 seconds
        )
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    url = f"http://{host}:{port}"
    send_key(url, settings.keys)
    return EngineProcess(f"vLLM engine {spec.index}", command, url, log_path, env)


def on_cpu() -> bool:
    return not this_machine().cuda


def server_options(settings: EngineSettings, spec: EngineSpec) -> dict[str, object]:
    """Return the options of a server by attribute name. The user's flags replace slime's choices.

    vLLM's log-probs are either those before temperature, top-p and top-k, or those after all of
    them. Training normalizes over the whole vocabulary at the run's temperature.
    """
    ours: dict[str, object] = {
        "model": spec.model_path,
        "dtype": settings.dtype or "auto",
        "seed": settings.seed + spec.index,
        "trust_remote_code": settings.trust_remote_code,
        "tensor_parallel_size": spec.num_gpus,
        "logprobs_mode": "processed_logprobs" if settings.whole_vocabulary else "raw_logprobs",
    }
    if settings.adapter_rank:
        ours["enable_lora"] = True
        ours["max_lora_rank"] = next(most for most in RANKS if most >= settings.adapter_rank)
    if on_cpu():
        ours |= ON_CPU
    elif settings.offload:
        ours["enable_sleep_mode"] = True
    return {**ours, **settings.options}
