"""Flags of inference servers: the router, and groups of SGLang servers
(``--sglang-config``).

``--sglang-config`` is read by :mod:`slime.plugins.sglang.options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slime.config.flag import Section, flag, path_flag
from slime.registry import find

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.cluster import ClusterConfig

MOST = 2**20  # upper limit of nodes, GPUs and engines; a larger number is a typing error


@dataclass
class EngineConfig(Section):
    _title = "engines and router"

    # Engines that compute in another type than the trainer would add to the mismatch of log-probs.
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = flag(same_as="train_dtype")
    """Data type of the engines' weights. Default: --train-dtype"""
    use_router: bool = False
    """Use sglang-router even if there is only one engine"""
    sglang_router_ip: str | None = None
    """IP address of a router that already runs. Default: slime starts one"""
    sglang_router_port: int | None = flag(low=1, high=65535)
    """Port of the router at --sglang-router-ip"""
    sglang_router_request_timeout_secs: int = flag(14400, low=1)
    """Deadline of a request to the router in seconds"""
    sglang_server_concurrency: int | None = flag(low=1)
    """Maximum number of concurrent requests per engine. Default: at first 512, then as many as the
    KV caches of the engines hold"""
    rollout_external_engine_addrs: list[str] | None = None
    """Addresses host:port of inference servers that already run, which slime never stops. Default:
    slime starts the engines"""
    sglang_config: str | None = path_flag()
    """YAML file that describes several served models, or groups of SGLang servers for prefill and
    decode. Default:
    one model and one kind of server"""
    prefill_num_servers: int | None = flag(low=1, high=MOST)
    """Number of SGLang servers that only prefill; the others only decode. Default: all do both"""
    logprob_gap_threshold: float | None = flag(low=0)
    """Warn if the step's mean log-probs of trainer and engine differ by more. Default: by data
    type
    """


FIRST_CONCURRENCY = 512
"""Concurrent requests per engine, before the engines have shown how many they can run."""
OUTER_CACHES = ("hicache_storage_backend", "enable_lmcache", "enable_unified_cache_external_linker")
OUTER_CACHE = (
    "this cache keeps the KV of prompts when the weights change, and SGLang finds it by their "
    "tokens, so that responses would be computed from old weights"
)
"""Why a KV cache outside the server is refused: ``/flush_cache`` does not reach it."""


def outer_caches(options: Mapping[str, object]) -> list[str]:
    """Return those of a server's options that make KV caches in other processes or on disk, as it
    is started with them."""
    return [f"--{name.replace('_', '-')}" for name in OUTER_CACHES if options.get(name)]


WorkerType = Literal["regular", "prefill", "decode", "placeholder"]
DEFAULT_MODEL = "default"  # name of the only model if --sglang-config is not given


class ServerGroupError(ValueError):
    """Raised for an invalid ``--sglang-config`` file. The message says where and what to change,
    without the file's name."""


@dataclass(frozen=True)
class ServerGroup:
    """A group of servers of the same kind."""

    worker_type: WorkerType
    num_gpus: int
    num_gpus_per_engine: int
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedModel:
    """One model behind one router."""

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[ServerGroup, ...]


def served_models(args: Args) -> list[ServedModel]:
    """Return the models that a run serves: those of ``--sglang-config``, or without it the trained
    one.

    Raises:
        ServerGroupError, OSError: The file is invalid, or cannot be read.
    """
    checkpoint = str(args.hf_checkpoint)
    per_engine = args.rollout_num_gpus_per_engine
    if args.sglang_config:
        models: list[ServedModel] = find("groups", "sglang")(
            args.sglang_config, checkpoint, per_engine
        )
        return models
    # The first engines only prefill, and the others only decode. A number above that of the engines
    # is refused by the checks, which also run after this plan was made.
    gpus = int(args.rollout_num_gpus or 0)
    prefill = min((args.prefill_num_servers or 0) * per_engine, gpus)
    groups = [ServerGroup("decode" if prefill else "regular", gpus - prefill, per_engine)]
    if prefill:
        groups.insert(0, ServerGroup("prefill", prefill, per_engine))
    return [ServedModel(DEFAULT_MODEL, checkpoint, True, tuple(groups))]


def readable_models(args: Args) -> list[ServedModel]:
    """Return the same; an empty list if the file is invalid, which :func:`check_server_groups`
    reports.
    """
    try:
        return served_models(args)
    except (ServerGroupError, OSError):
        return []


def total_gpus(models: list[ServedModel]) -> int:
    """Return the number of GPUs of all groups, including placeholders."""
    return sum(group.num_gpus for model in models for group in model.groups)


def check_server_groups(args: Args) -> list[str]:
    """Check that ``--sglang-config`` or ``--prefill-num-servers`` fits the number of GPUs."""
    if not args.sglang_config:
        servers = args.num_servers
        if args.prefill_num_servers is None or 0 < args.prefill_num_servers < servers:
            return []
        return [
            f"--prefill-num-servers {args.prefill_num_servers} of {servers} servers: at least one "
            "must decode"
        ]
    where = f"--sglang-config {args.sglang_config}"
    gpus = args.rollout_num_gpus
    try:
        total = total_gpus(served_models(args))
    except (ServerGroupError, OSError) as error:
        return [f"{where}: {error}"]
    if total == gpus:
        return []
    return [f"{where}: its groups have {total} GPUs, but --rollout-num-gpus is {gpus}"]


def engines_beside_trainer(gpus: ClusterConfig, shared: list[tuple[ServerGroup, int]]) -> list[str]:
    """Refuse colocated servers (:func:`shared_groups`) on GPUs without a training rank, which CUDA
    IPC cannot reach.
    """
    train = gpus.actor_num_nodes * (gpus.actor_num_gpus_per_node or 1)
    if all(end <= train for _, end in shared):
        return []
    return [
        f"--colocate with {asked_gpus(gpus)}: some servers that get the trainer's weights would "
        "be on GPUs without a training rank, which CUDA IPC cannot reach; place them on the "
        f"first {train} GPUs, or use --update-weight-transport disk"
    ]


def shared_groups(args: Args) -> list[tuple[ServerGroup, int]]:
    """Return the groups of servers that get weights by CUDA IPC from the trainer on their GPUs,
    each with the index after its last GPU. Only the first model that is updated shares the
    trainer's GPUs."""
    by_handle = (
        args.colocate
        and args.update_weight_transport == "nccl"
        and args.rollout_backend == "sglang"
    )
    if (
        not by_handle
        or args.debug_train_only
        or args.debug_rollout_only
        or args.rollout_external_engine_addrs
    ):
        return []
    shared = []
    end = 0
    # A handle can be opened only on the GPU that it comes from, so the positions on the GPUs
    # matter.
    models = readable_models(args)
    updated = next((model for model in models if model.update_weights), None)
    for model in models:
        for group in model.groups:
            end += group.num_gpus
            if model is updated and group.worker_type != "placeholder":
                shared.append((group, end))
    return shared


def asked_gpus(gpus: ClusterConfig) -> str:
    named = {
        "--actor-num-nodes": gpus.actor_num_nodes if gpus.actor_num_nodes > 1 else None,
        "--actor-num-gpus-per-node": gpus.actor_num_gpus_per_node,
        "--critic-num-nodes": gpus.critic_num_nodes,
        "--critic-num-gpus-per-node": gpus.critic_num_gpus_per_node,
        "--rollout-num-gpus": gpus.rollout_num_gpus,
    }
    return ", ".join(f"{option} {count}" for option, count in named.items() if count is not None)
