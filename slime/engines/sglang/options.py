"""SGLang's own command line for one server: what slime decides, the user's ``--sglang-…``, the group's overrides."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.machine import this_machine
from slime.config.passthrough import command_line
from slime.engines.sglang_api import DELTA_LOADER

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.engines.plan import EngineSpec

CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,  # its own default is a share of all memory
    "sleep_on_idle": True,  # else an idle scheduler takes a core
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


def runs_on_cpu(args: Args, spec: EngineSpec) -> bool:
    """As ``--sglang-device`` says; without it, whether this node has no GPU."""
    device = {**args.sglang, **spec.options}.get("device")
    return device == "cpu" if device else not this_machine().cuda


def server_options(args: Args, spec: EngineSpec, place: ServerPlace) -> dict[str, Any]:
    """SGLang's options by attribute name. The group's overrides win over the flags, both over defaults of ours.

    Reads from ``args``: sglang, rollout_dtype (else train_dtype), rollout_seed, trust_remote_code, deterministic,
    offload_rollout, use_rollout_routing_replay, update_weight_mode.
    """
    given = {**args.sglang, **spec.options}
    ours: dict[str, Any] = {
        "model_path": spec.model_path,
        "host": place.host,
        "port": place.port,
        "tp_size": spec.num_gpus // int(given.get("pp_size") or 1),
        "random_seed": int(args.rollout_seed) + spec.index,
        "skip_server_warmup": True,
        "trust_remote_code": bool(args.trust_remote_code),
        "enable_return_routed_experts": bool(args.use_rollout_routing_replay),
        "incremental_streaming_output": True,  # else each event of a stream repeats the whole answer so far
    }
    if spec.updates:
        ours["dtype"] = args.rollout_dtype or args.train_dtype
        if args.update_weight_mode == "delta":
            ours["custom_weight_loader"] = [DELTA_LOADER]
    if place.num_nodes > 1:
        ours |= {"nnodes": place.num_nodes, "node_rank": place.node_rank, "dist_init_addr": place.dist_init_addr}
    if spec.worker_type in ("prefill", "decode"):
        ours["disaggregation_mode"] = spec.worker_type
        if place.bootstrap_port is not None:
            ours["disaggregation_bootstrap_port"] = place.bootstrap_port
    if runs_on_cpu(args, spec):
        return {**ours, "device": "cpu", **CPU_DEFAULTS, **given}
    if args.offload_rollout:
        ours["enable_memory_saver"] = True
        ours["enable_weights_cpu_backup"] = not spec.updates  # nobody sends such a model's weights again
    if args.deterministic:
        ours["enable_deterministic_inference"] = True
    return {**ours, **given}


def server_words(args: Args, spec: EngineSpec, place: ServerPlace) -> list[str]:
    """The command line of one server, without the program."""
    return command_line("sglang", server_options(args, spec, place))


def server_environment(args: Args, spec: EngineSpec) -> dict[str, str]:
    """Environment of a server process."""
    env = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    threads = args.threads_per_process
    if runs_on_cpu(args, spec):
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        threads = 1  # two OpenMP threads on busy cores can spin each other to a standstill
        if spec.num_gpus > 1 and BIND not in os.environ:  # its default is one rank per NUMA node, and no more
            env[BIND] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(spec.num_gpus))
    if threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    return env
