"""SGLang's own command line for one server: what slime decides, the user's ``--sglang-…``, the group's overrides."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.machine import this_machine
from slime.config.passthrough import command_line
from slime.engines.sglang_api import DELTA_LOADER

if TYPE_CHECKING:
    from slime.engines.plan import EngineSpec
    from slime.engines.settings import EngineSettings

CPU_DEFAULTS: dict[str, object] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,  # its own default is a share of all memory
    "sleep_on_idle": True,  # otherwise an idle scheduler takes a whole core
}
BIND = "SGLANG_CPU_OMP_THREADS_BIND"  # the cores of each rank, separated by |


@dataclass(frozen=True)
class ServerPlace:
    """Where one process of a server runs: address, and its part of a server that spans nodes."""

    host: str
    port: int
    node_rank: int = 0
    num_nodes: int = 1
    dist_init_addr: str | None = None  # host:port of the first node
    bootstrap_port: int | None = None  # of a prefill server


def runs_on_cpu(settings: EngineSettings, spec: EngineSpec) -> bool:
    """As ``--sglang-device`` says; without it, whether this node has no GPU."""
    device = {**settings.sglang, **spec.options}.get("device")
    return device == "cpu" if device else not this_machine().cuda


def server_options(settings: EngineSettings, spec: EngineSpec, place: ServerPlace) -> dict[str, object]:
    """SGLang's options by attribute name. The group's overrides win over the flags, both over slime's own
    choices."""
    given = {**settings.sglang, **spec.options}
    ours: dict[str, object] = {
        "model_path": spec.model_path,
        "host": place.host,
        "port": place.port,
        "tp_size": spec.num_gpus // int(str(given.get("pp_size") or 1)),
        "random_seed": settings.seed + spec.index,
        "skip_server_warmup": True,
        "trust_remote_code": settings.trust_remote_code,
        "enable_return_routed_experts": settings.return_routed_experts,
        "incremental_streaming_output": True,  # else each event of a stream repeats the whole answer so far
    }
    if spec.updates:
        ours["dtype"] = settings.dtype
        if settings.updates_by_delta:
            ours["custom_weight_loader"] = [DELTA_LOADER]
    if place.num_nodes > 1:
        ours |= {"nnodes": place.num_nodes, "node_rank": place.node_rank, "dist_init_addr": place.dist_init_addr}
    if spec.worker_type in ("prefill", "decode"):
        ours["disaggregation_mode"] = spec.worker_type
        if place.bootstrap_port is not None:
            ours["disaggregation_bootstrap_port"] = place.bootstrap_port
    if runs_on_cpu(settings, spec):
        return {**ours, "device": "cpu", **CPU_DEFAULTS, **given}
    if settings.offload:
        ours["enable_memory_saver"] = True
        ours["enable_weights_cpu_backup"] = not spec.updates  # nobody sends such a model's weights again
    if settings.deterministic:
        ours["enable_deterministic_inference"] = True
    return {**ours, **given}


def server_words(settings: EngineSettings, spec: EngineSpec, place: ServerPlace) -> list[str]:
    """The command line of one server, without the program."""
    return command_line("sglang", server_options(settings, spec, place))


def server_environment(settings: EngineSettings, spec: EngineSpec) -> dict[str, str]:
    """Environment of a server process."""
    env = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    threads = settings.threads
    if runs_on_cpu(settings, spec):
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        threads = 1  # two OpenMP threads on busy cores can spin each other to a standstill
        if spec.num_gpus > 1 and BIND not in os.environ:  # its default is one rank per NUMA node, and no more
            env[BIND] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(spec.num_gpus))
    if threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    return env
