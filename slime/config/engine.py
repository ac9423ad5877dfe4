"""Flags of inference servers: the embedded engine, the router, and groups of SGLang servers
(``--sglang-config``).

``--sglang-config`` is a YAML file with one or more models. Each has groups of SGLang servers for
prefill, decode or both:

    sglang:
      - name: actor                  # its router is args.sglang_router_ip/port; others: get_model_url(args, name)
        num_gpus_per_engine: 2       # default: --rollout-num-gpus-per-engine
        server_groups:
          - {worker_type: prefill, num_gpus: 2}
          - {worker_type: decode, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: /models/judge    # default: --hf-checkpoint
        update_weights: false        # default: true if model_path is --hf-checkpoint
        server_groups:
          - {worker_type: regular, num_gpus: 1}

``worker_type`` is regular, prefill, decode, or placeholder, which reserves GPUs without using them.
``overrides`` are options of SGLang by attribute name; they take precedence over ``--sglang-…``
flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.config.files import TABLES, form_problems, load_yaml, read_json
from slime.config.flag import DERIVED, Section, flag, path_flag
from slime.config.passthrough import KEYS, programs

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.cluster import ClusterConfig

MOST = 2**20  # upper limit of nodes, GPUs and engines; a larger number is a typing error


def torch_device(text: str) -> None:
    """Check the name of a device; raises a ValueError for one of another kind."""
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"{text} must be cpu or cuda")


@dataclass
class EngineConfig(Section):
    _title = "engines and router"

    rollout_dtype: str = flag(DERIVED, choices=("float32", "bfloat16", "float16"))
    """Data type of the engines' weights. Default: --train-dtype"""
    use_router: bool = False
    """Use sglang-router even if there is only one engine"""
    embedded_max_running_requests: int = flag(64, low=1)
    """Maximum number of requests that the embedded engine decodes at once"""
    embedded_max_total_tokens: int | None = flag(None, low=1)
    """Tokens in the embedded engine's KV cache. Default: chosen by available memory"""
    embedded_device: str = flag(DERIVED, valid=torch_device)
    """Device of the embedded engine, cpu or cuda. Default: cuda if available"""
    sglang_router_ip: str | None = None
    """IP address of a router that already runs. Default: slime starts one"""
    sglang_router_port: int | None = flag(None, low=1, high=65535)
    """Port of the router at --sglang-router-ip"""
    sglang_router_request_timeout_secs: int = flag(14400, low=1)
    """Deadline of a request to the router in seconds"""
    sglang_server_concurrency: int = flag(512, low=1)
    """Maximum number of concurrent requests per engine"""
    rollout_external_engine_addrs: list[str] | None = None
    """Addresses host:port of inference servers that already run, which slime never stops. Default:
    slime starts the engines"""
    sglang_config: str | None = path_flag()
    """YAML file that describes several served models, or groups of SGLang servers for prefill and
    decode. Default:
    one model and one kind of server"""
    prefill_num_servers: int | None = flag(None, low=1, high=MOST)
    """Number of SGLang servers that only prefill; the others only decode. Default: all do both"""
    logprob_gap_threshold: float | None = flag(None, low=0)
    """Warn if the step's mean log-probs of trainer and engine differ by more. Default: by data
    type
    """


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


def check_outer_caches(args: Args) -> list[str]:
    """Refuse KV caches that outlive a weight update."""
    if args.rollout_backend != "sglang" or args.debug_rollout_only:
        return []
    updated = [
        group for model in _readable_models(args) if model.update_weights for group in model.groups
    ]
    given = {
        option for group in updated for option in outer_caches({**args.sglang, **group.overrides})
    }
    return [
        f"{option.replace('--', '--sglang-', 1)}: {OUTER_CACHE}: leave it out. "
        "--sglang-enable-hierarchical-cache keeps KV in the host memory of the server, which "
        "slime flushes"
        for option in sorted(given)
    ]


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


def read_server_groups(
    file: str, hf_checkpoint: str, num_gpus_per_engine: int
) -> list[ServedModel]:
    """Read the models of a ``--sglang-config`` file, in the order of the file.

    Raises:
        ServerGroupError: The file is invalid.
        OSError: The file cannot be read.
    """
    try:
        document = load_yaml(Path(file).expanduser())
    except ValueError as error:
        raise ServerGroupError(str(error)) from error
    # The schema says what is wrong in types and names, so the code below can rely on them.
    _check_form(document)
    models = [_model(entry, hf_checkpoint, num_gpus_per_engine) for entry in document["sglang"]]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ServerGroupError(f"two models have the name {name!r}")
    if not any(model.update_weights for model in models):
        raise ServerGroupError(
            "no model gets the trainer's weights: leave out model_path of one model, or set its "
            "update_weights"
        )
    return models


def _check_form(document: object) -> None:
    """Check the types and names in the file. All that is wrong is told at once."""
    if problems := form_problems(document, read_json(TABLES / "sglang_config.json")):
        raise ServerGroupError("; ".join(problems))


def simple_groups(
    model_path: str, num_gpus: int, num_gpus_per_engine: int, prefill_servers: int
) -> list[ServedModel]:
    """Return the only model of a run without ``--sglang-config``: ``num_gpus`` GPUs are split into
    engines, of which the first ``prefill_servers`` only prefill and the others only decode."""
    # A number above that of the engines is refused by the checks, which also run after this plan
    # was made.
    prefill = min(prefill_servers * num_gpus_per_engine, num_gpus)
    groups = [
        ServerGroup("decode" if prefill else "regular", num_gpus - prefill, num_gpus_per_engine)
    ]
    if prefill:
        groups.insert(0, ServerGroup("prefill", prefill, num_gpus_per_engine))
    return [ServedModel(DEFAULT_MODEL, model_path, True, tuple(groups))]


def served_models(args: Args) -> list[ServedModel]:
    """Return the models that a run serves: those of ``--sglang-config``, or without it the trained
    one.

    Raises:
        ServerGroupError, OSError: The file is invalid, or cannot be read.
    """
    checkpoint = str(args.hf_checkpoint)
    per_engine = args.rollout_num_gpus_per_engine
    if args.sglang_config:
        return read_server_groups(args.sglang_config, checkpoint, per_engine)
    gpus = int(args.rollout_num_gpus or 0)
    return simple_groups(checkpoint, gpus, per_engine, args.prefill_num_servers or 0)


def _readable_models(args: Args) -> list[ServedModel]:
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


def _model(entry: dict[str, Any], hf_checkpoint: str, per_engine: int) -> ServedModel:
    where = f"model {str(entry['name'])!r}"
    path = str(entry.get("model_path") or hf_checkpoint)
    per_engine = entry.get("num_gpus_per_engine", per_engine)
    entries = entry.get("server_groups") or entry["engine_groups"]
    groups = tuple(
        _group(group, f"{where}, group {i}", per_engine) for i, group in enumerate(entries, 1)
    )
    # A router speaks either with regular servers or with pairs of prefill and decode servers.
    kinds = {group.worker_type for group in groups} - {"placeholder"}
    if kinds not in ({"regular"}, {"prefill", "decode"}):
        has = ", ".join(sorted(kinds)) or "only placeholders"
        raise ServerGroupError(f"{where} has {has}: use only regular, or prefill and decode")
    return ServedModel(
        str(entry["name"]), path, entry.get("update_weights", path == hf_checkpoint), groups
    )


def _group(entry: dict[str, Any], where: str, per_engine: int) -> ServerGroup:
    kind = entry.get("worker_type", "regular")
    gpus = entry["num_gpus"]
    per_engine = entry.get("num_gpus_per_engine", per_engine)
    if gpus % per_engine and kind != "placeholder":
        raise ServerGroupError(
            f"{where}: num_gpus {gpus} is not a multiple of num_gpus_per_engine {per_engine}"
        )
    overrides = {
        str(name).replace("-", "_"): value for name, value in (entry.get("overrides") or {}).items()
    }
    # What is refused as a flag is refused here as well.
    for name in overrides:
        if name in KEYS:
            flag_name = f"--sglang-{name.replace('_', '-')}"
            raise ServerGroupError(
                f"{where}: overrides: all servers have the same {name}: use {flag_name}"
            )
        if reason := programs()["sglang"].reasons["not supported"].get(name):
            raise ServerGroupError(f"{where}: overrides: {name} is not supported: {reason}")
    return ServerGroup(kind, gpus, per_engine, overrides)


def check_server_groups(args: Args) -> list[str]:
    """Check that ``--sglang-config`` or ``--prefill-num-servers`` fits the number of GPUs."""
    if not args.sglang_config:
        servers = (args.rollout_num_gpus or 0) // max(args.rollout_num_gpus_per_engine, 1)
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
    wrong = f"{where}: its groups have {total} GPUs, but --rollout-num-gpus is {gpus}"
    return [] if total == gpus else [wrong]


def check_colocated_pipelines(args: Args) -> list[str]:
    """Refuse pipeline stages of colocated servers: SGLang passes the same CUDA IPC handle to all
    pipeline stages of a tensor-parallel rank, but a handle can be opened only on the GPU that it
    comes from."""
    stages = [
        int({**args.sglang, **group.overrides}.get("pp_size") or 1)
        for group, _ in _shared_groups(args)
    ]
    if max(stages, default=1) == 1:
        return []
    return [
        f"--colocate with servers of {max(stages)} pipeline stages (--sglang-pp-size): CUDA IPC "
        "sends weights only to the tensor-parallel ranks of one stage; use only tensor "
        "parallelism, or --update-weight-transport disk"
    ]


def engines_beside_trainer(args: Args) -> list[str]:
    """Refuse colocated servers on GPUs without a training rank, which CUDA IPC cannot reach."""
    train = args.actor_num_nodes * args.actor_num_gpus_per_node
    if all(end <= train for _, end in _shared_groups(args)):
        return []
    return [
        f"--colocate with {asked_gpus(args)}: some servers that get the trainer's weights would "
        "be on GPUs without a training rank, which CUDA IPC cannot reach; place them on the "
        f"first {train} GPUs, or use --update-weight-transport disk"
    ]


def _shared_groups(args: Args) -> list[tuple[ServerGroup, int]]:
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
    models = _readable_models(args)
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
