"""Start the server of one SGLang engine: its command line, its environment, and its first
request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.config.machine import this_machine
from slime.config.passthrough import command_line
from slime.config.process import module_command
from slime.engines.http import request_blocking
from slime.engines.keys import send_key
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import EngineProcess, ServerFailed, free_port, without_proxy
from slime.plugins.sglang.options import keyless_options
from slime.registry import find

CPU_DEFAULTS: dict[str, object] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,  # SGLang's default is a share of the whole memory
    "sleep_on_idle": True,  # otherwise an idle scheduler keeps a whole core busy
}
ADAPTER_SLOTS = 4
"""The number of adapters in a batch, of which the base counts as one. Each slot takes GPU memory of
one adapter.
"""
BIND = "SGLANG_CPU_OMP_THREADS_BIND"  # the CPU cores of each rank, separated by |
BALANCE_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""Whether a server with several ranks refuses to start if one of its GPUs has less than 90% of the
free memory of another one."""


@dataclass(frozen=True)
class ServerPlace:
    """The ports of one server process, and its node rank if the server runs on several nodes."""

    host: str
    port: int
    node_rank: int = 0
    num_nodes: int = 1
    dist_init_addr: str | None = None  # host:port of the rendezvous on the first node
    bootstrap_port: int | None = None  # for prefill servers only
    nccl_port: int | None = None  # where the ranks of a server on one node meet


def runs_on_cpu(settings: EngineSettings, spec: EngineSpec) -> bool:
    """Return whether ``--sglang-device`` is ``cpu``, or without this flag, whether this node has no
    GPU.
    """
    device = {**settings.sglang, **spec.options}.get("device")
    return device == "cpu" if device else not this_machine().cuda


def sampling_backend(settings: EngineSettings, spec: EngineSpec) -> str | None:
    """Return the value of ``--sglang-sampling-backend``, or None for SGLang's choice.

    On a GPU SGLang chooses flashinfer, whose kernels for top-p and top-k are compiled for a minute
    or two at the first start on a machine, with ``nvcc``. Requests for neither are sampled by the
    same code with both backends. In a run without top-p and top-k only health checks need the
    kernels, because a greedy token is top-k with k = 1 in SGLang.
    """
    options = {**settings.sglang, **spec.options}
    if backend := options.get("sampling_backend"):
        return str(backend)
    # SGLang has samplers of its own for other devices.
    return (
        "pytorch" if settings.whole_vocabulary and options.get("device") in (None, "cuda") else None
    )


def server_options(
    settings: EngineSettings, spec: EngineSpec, place: ServerPlace
) -> dict[str, object]:
    """Return the options of a server by attribute name.

    The overrides of the group take precedence over the user's flags, and these over the choices of
    slime.
    """
    user_options = {**settings.sglang, **spec.options}
    ours: dict[str, object] = {
        "model_path": spec.model_path,
        "host": place.host,
        "port": place.port,
        "tp_size": spec.num_gpus // int(str(user_options.get("pp_size") or 1)),
        "random_seed": settings.seed + spec.index,
        "skip_server_warmup": True,
        "trust_remote_code": settings.trust_remote_code,
        "enable_return_routed_experts": settings.return_routed_experts,
        # otherwise each event of a stream repeats the whole response so far
        "incremental_streaming_output": True,
    }
    if spec.updates:
        ours["dtype"] = settings.dtype
        if settings.weight_loader is not None:
            ours["custom_weight_loader"] = [settings.weight_loader]
        if settings.fp8 is not None:
            # as config.json says; named, so that /server_info reports it
            ours["quantization"] = "fp8"
        if settings.kernels is not None:
            ours |= find("served kernels", settings.kernels)[0]
    if settings.adapter_rank and spec.updates:
        ours |= {
            "enable_lora": True,
            "max_lora_rank": settings.adapter_rank,
            "lora_target_modules": list(settings.adapter_targets),
            "max_loras_per_batch": ADAPTER_SLOTS,
        }
        if runs_on_cpu(settings, spec):
            ours["lora_backend"] = "torch_native"
    # A server with several data-parallel groups needs a port for each of them, and chooses them
    # itself.
    if place.nccl_port is not None and int(str(user_options.get("dp_size") or 1)) == 1:
        ours["nccl_port"] = place.nccl_port
    if place.num_nodes > 1:
        ours |= {
            "nnodes": place.num_nodes,
            "node_rank": place.node_rank,
            "dist_init_addr": place.dist_init_addr,
        }
    if spec.worker_type in ("prefill", "decode"):
        ours["disaggregation_mode"] = spec.worker_type
        if place.bootstrap_port is not None:
            ours["disaggregation_bootstrap_port"] = place.bootstrap_port
    if runs_on_cpu(settings, spec):
        return {**ours, "device": "cpu", **CPU_DEFAULTS, **user_options}
    if settings.offload:
        ours["enable_memory_saver"] = True
        # Without updates, nobody sends released weights again. With an adapter, nobody sends the
        # base again.
        ours["enable_weights_cpu_backup"] = not spec.updates or bool(settings.adapter_rank)
    if settings.deterministic:
        ours["enable_deterministic_inference"] = True
    if (backend := sampling_backend(settings, spec)) is not None:
        ours["sampling_backend"] = backend
    return {**ours, **user_options}


def takes_keys(settings: EngineSettings, spec: EngineSpec) -> bool:
    """Return whether a server can have keys, which SGLang refuses together with some options."""
    return not keyless_options({**settings.sglang, **spec.options})


def server_words(settings: EngineSettings, spec: EngineSpec, place: ServerPlace) -> list[str]:
    """Return the command-line arguments of one server, without the program."""
    return command_line("sglang", server_options(settings, spec, place))


def server_environment(settings: EngineSettings, spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables to set for a server process."""
    env = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    threads = settings.threads
    if runs_on_cpu(settings, spec):
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        threads = 1  # on busy cores, OpenMP threads that spin can block each other
        # SGLang's default allows only one rank per NUMA node.
        if spec.num_gpus > 1 and BIND not in os.environ:
            env[BIND] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(spec.num_gpus))
    if settings.colocated and BALANCE_CHECK not in os.environ:
        # the ranks of a trainer that loads at the same time are not equally far
        env[BALANCE_CHECK] = "0"
    if settings.kernels is not None and spec.updates:
        env |= find("served kernels", settings.kernels)[1]
    if threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    return env


class SglangProcess(EngineProcess):
    """A server of SGLang."""

    warms_up_sampler = False
    """Whether it samples with top-p and top-k once before it counts as ready."""

    def wait_ready(self, deadline: float) -> None:
        until = time.monotonic() + deadline
        super().wait_ready(deadline)
        if not self.warms_up_sampler:
            return
        try:
            warm_up(self.url, max(until - time.monotonic(), 1.0))
        except ServerFailed as error:
            raise ServerFailed(f"{error}\n{self.log_tail()}") from error


# Start the server of one SGLang engine, or the part of it that runs on one node.


def start(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str,
    log_path: str | Path | None,
    gpu_ids: Sequence[int] | None,
    node: tuple[int, int, str | None],
) -> SglangProcess:
    """Start the server behind a guard process; see :func:`slime.engines.launch.start_engine`."""
    # Every port is chosen here and kept free until the server listens, half a minute later.
    port = free_port(host)
    bootstrap = free_port(host) if spec.worker_type == "prefill" else None
    rank, num_nodes, rendezvous = node
    # SGLang's own choice can be taken by an outgoing connection before the ranks have loaded their
    # modules and listen.
    meeting = free_port(host) if num_nodes == 1 else None
    place = ServerPlace(host, port, rank, num_nodes, rendezvous, bootstrap, meeting)
    # The guard ends the server with this process, also if this process is killed.
    command = [*module_command("slime.engines.guard"), "--parent", str(os.getpid()), "--"]
    command += [
        *module_command("slime.plugins.sglang.server"),
        *server_words(settings, spec, place),
    ]
    # Keys and GPUs are in the environment, which other users cannot read.
    env = {**without_proxy(spec.model_path, host), **server_environment(settings, spec)}
    if takes_keys(settings, spec):
        env |= settings.keys.environment()
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    # The name of the server in messages and logs.
    part = f" node {rank}" if num_nodes > 1 else ""
    what = f"SGLang engine {spec.index}{part}" + (
        f" ({spec.model})" if spec.model != "default" else ""
    )
    ports = [(host, number) for number in (bootstrap, meeting) if number is not None]
    url = f"http://{host}:{port}"
    send_key(url, settings.keys)
    engine = SglangProcess(what, command, url, log_path, env, ports)
    engine.bootstrap_port = bootstrap
    # Of a server that spans nodes, the first node answers.
    engine.warms_up_sampler = rank == 0 and needs_sampler_warmup(settings, spec)
    return engine


# Warm up the top-p and top-k kernels of SGLang on a GPU, which are compiled at the first batch that
# needs them.
#
# The first compilation on a machine takes more than a minute. Until then the engine answers no
# request, so a health check would report it as dead.


def warm_up(url: str, seconds: float) -> None:
    """Send one request with top-p and top-k.

    Raises:
        ServerFailed: The engine did not answer with status 200 within ``seconds``.
    """
    cut_off = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 2}
    try:
        body = {"input_ids": [0], "sampling_params": cut_off}
        status, answer = request_blocking("POST", f"{url}/generate", body, seconds)
    except OSError as error:
        raise ServerFailed(
            f"{url} did not answer its first request with top-p and top-k: {error!r}"
        ) from error
    if status != 200:
        message = answer.decode(errors="replace")[:500]
        advice = "--sglang-sampling-backend pytorch uses no kernels that must be compiled"
        raise ServerFailed(
            f"{url} cannot sample with top-p and top-k: {status} {message}; {advice}"
        )


def needs_sampler_warmup(settings: EngineSettings, spec: EngineSpec) -> bool:
    """Whether the server must sample with top-p and top-k to count as ready, so that SGLang
    compiles the kernels.

    Every server needs it whose sampling backend has kernels to compile. SGLang's own health check
    asks for a greedy token, greedy is top-k with k = 1 there, and a batch with one such request is
    sampled with the top-k kernel as a whole. Without a warm-up, the first health check of a rollout
    would stop the engine for more than a minute. A server that only prefills or only decodes
    answers no plain request, so it cannot be warmed up; models that are not trained get no
    rollouts.
    """
    compiles = sampling_backend(settings, spec) != "pytorch"
    return compiles and spec.updates and spec.worker_type == "regular"
