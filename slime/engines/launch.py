"""The engines and routers of a run: their settings from the flags, the servers to start, and the
start of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from slime.config.cluster import inline_engine
from slime.config.engine import (
    DEFAULT_MODEL,
    EngineConfig,
    WorkerType,
    served_models,
)
from slime.config.hf_config import model_config
from slime.config.lora import ALL_LINEAR, FUSED, PROJECTIONS, engine_adapter
from slime.config.passthrough import KEYS, command_line, given_options, programs
from slime.config.rollout import samples_whole_vocabulary
from slime.config.weight_sync import transport_part
from slime.engines.keys import NO_KEYS, RunKeys, ServerKeys
from slime.models.fp8_format import Fp8Format
from slime.registry import find, load, names_called_for

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.trainer import RolloutPrecisionConfig
    from slime.models.fp8_format import Granularity


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started. None means the default of the server.

    Attributes:
        model: ``--hf-checkpoint``, a folder or a hub id.
        backend: ``embedded`` or ``sglang``.
        dtype: The dtype of the weights, for example ``bfloat16``.
        device, max_running_requests, max_total_tokens: For the embedded engine only; SGLang has its
            own flags for them.
        threads: The number of CPU threads of a server process.
        seed: SGLang engine ``i`` is started with the seed ``seed + i``, for requests that have no
            seed.
        offload: Whether the engine releases its GPU memory while the trainer works.
        colocated: Whether the trainer uses the engine's GPUs.
        return_routed_experts: Whether responses contain the experts to which each token was routed.
        weight_loader: The function by which a server loads what the transport of weights has
            published (SGLang's ``--custom-weight-loader``); None for the server's own.
        fp8: How the weights are quantized (``--rollout-quantization fp8``); None if they are not.
        sglang: The given ``--sglang-…`` options, by attribute name, without keys.
        options: The given options of a registered engine (``--NAME-…``), by attribute name.
        keys: The keys that the engine asks for; see :mod:`slime.engines.keys`.
        whole_vocabulary: Whether no flag asks for top-p or top-k sampling.
        adapter_rank: The rank of the adapters that an engine shall load by name; 0 for none.
        adapter_targets: The projections that these adapters may change.
        kernels: The part of the kind ``kernels`` that the embedded engine uses.
        inline: Whether the embedded engine runs on threads of this process: ``port`` with a port as
            well, ``None`` in a process of its own.
    """

    model: str
    backend: str = "embedded"
    dtype: str | None = None
    device: str | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    deterministic: bool = False
    threads: int | None = None
    trust_remote_code: bool = False
    seed: int = 0
    offload: bool = False
    colocated: bool = False
    return_routed_experts: bool = False
    weight_loader: str | None = None
    fp8: Fp8Format | None = None
    sglang: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    keys: ServerKeys = NO_KEYS
    whole_vocabulary: bool = False
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    inline: Literal["no port", "port"] | None = None
    kernels: str | None = None

    @classmethod
    def from_args(cls, args: Args, keys: ServerKeys = NO_KEYS) -> EngineSettings:
        named = engine_adapter(args.lora_rank, args.lora_sync, args.rollout_backend)
        return cls(
            model=str(args.hf_checkpoint),
            backend=args.rollout_backend,
            dtype=args.rollout_dtype or args.train_dtype,
            device=args.embedded_device,
            max_running_requests=args.embedded_max_running_requests,
            max_total_tokens=args.embedded_max_total_tokens,
            deterministic=bool(args.deterministic),
            threads=args.threads_per_process,
            trust_remote_code=args.trust_remote_code,
            seed=int(args.rollout_seed),
            offload=bool(args.offload_rollout),
            colocated=args.colocate,
            return_routed_experts=args.use_rollout_routing_replay,
            weight_loader=load(transport_part(args).target).weight_loader,
            fp8=fp8_format(
                args, args.rollout_backend, args.hf_checkpoint, args.rollout_num_gpus_per_engine
            ),
            sglang=given_options(vars(args), "sglang"),
            options=given_options(vars(args), args.rollout_backend),
            keys=keys,
            whole_vocabulary=samples_whole_vocabulary(rollout=args, evaluation=args),
            adapter_rank=args.lora_rank if named is not None else 0,
            adapter_targets=tuple(sglang_targets(args.lora_target_modules))
            if named is not None
            else (),
            inline=inline_engine(args),
            kernels=next(iter(names_called_for("kernels", args)), None),
        )


def sglang_targets(targets: Sequence[str]) -> list[str]:
    """Return the projections on which an SGLang server needs room for adapters of
    ``--lora-target-modules``.
    """
    names = [name.rpartition(".")[2] for name in targets]
    chosen = set(PROJECTIONS if ALL_LINEAR in names else names)
    return [
        name
        for name in PROJECTIONS
        if any(name in group and chosen & set(group) for group in FUSED)
    ]


def fp8_format(
    precision: RolloutPrecisionConfig, backend: str, model: str, gpus: int
) -> Fp8Format | None:
    """Return how the weights of engines are quantized (``--rollout-quantization``); None if they
    are not.

    Args:
        gpus: The number of GPUs of an engine, over which SGLang divides the key-value heads.
    """
    if precision.rollout_quantization is None:
        return None
    granularity = cast("Granularity", precision.rollout_quantization_scale)
    if backend != "sglang":
        return Fp8Format(granularity)
    config = model_config(model)
    heads = int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)
    return Fp8Format(granularity, gpus, heads)


@dataclass(frozen=True)
class RouterSettings:
    """How a router is started, or the address of a router that runs already.

    Attributes:
        request_seconds: The time limit of the router for a request.
        options: The given ``--router-…`` options, by attribute name, without keys.
        address: Host and port of a running router for the first model. With None, slime starts that
            router too.
        keys: The keys that the router asks for.
        address_keys: The keys that the router at ``address`` asks for.
        control_keys: The entries of ``--router-control-plane-api-keys``.
    """

    request_seconds: int = EngineConfig.sglang_router_request_timeout_secs
    options: Mapping[str, object] = field(default_factory=dict)
    address: tuple[str, int] | None = None
    keys: ServerKeys = NO_KEYS
    address_keys: ServerKeys = NO_KEYS
    control_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def words(self) -> list[str]:
        """The options as command-line arguments, including the defaults that slime sets."""
        return command_line("router", {**programs()["router"].defaults, **self.options})

    @classmethod
    def of(
        cls, flags: EngineConfig, router: Mapping[str, Any], keys: RunKeys | None = None
    ) -> RouterSettings:
        keys = keys or RunKeys()
        address = None
        if flags.sglang_router_ip and flags.sglang_router_port is not None:
            address = flags.sglang_router_ip, flags.sglang_router_port
        return cls(
            flags.sglang_router_request_timeout_secs,
            {name: value for name, value in router.items() if name not in KEYS},
            address,
            keys.router,
            keys.external_router,
            tuple(map(str, router.get("control_plane_api_keys") or ())),
        )


# The servers that a run starts, each as an :class:`EngineSpec`, from ``--rollout-num-gpus`` or
# ``--sglang-config``.


@dataclass(frozen=True)
class EngineSpec:
    """One server. It holds everything that a restart of the server needs.

    Attributes:
        index: The number of the server among all servers of the run. The names of its actor and log
            contain it.
        model: The name of the served model; ``default`` without ``--sglang-config``.
        slot: The first accelerator of the server among ``--rollout-num-gpus`` (without GPUs, its
            first process slot).
        num_gpus: The number of accelerators of the server on all its nodes.
        updates: Whether the server receives the trainer's weights.
        options: The SGLang options of its group, by attribute name.
    """

    index: int
    model_path: str
    model: str = DEFAULT_MODEL
    worker_type: WorkerType = "regular"
    slot: int = 0
    num_gpus: int = 1
    updates: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def plan_engines(args: Args) -> list[EngineSpec]:
    """Return the servers of a run in the order of model, group and slot.

    The models are those of ``--sglang-config``, or without it one model, served by engines of one
    size. The list is empty with ``--rollout-external-engine-addrs``. The trainer has one set of
    weights, which goes to the first model with ``update_weights``; no other model is updated.
    """
    if args.rollout_external_engine_addrs:
        return []
    specs: list[EngineSpec] = []
    slot = 0
    models = served_models(args)
    # The trainer has one set of weights, so at most one model is updated.
    updated = next((model.name for model in models if model.update_weights), None)
    for model in models:
        for group in model.groups:
            count = (
                group.num_gpus // group.num_gpus_per_engine
                if group.worker_type != "placeholder"
                else 0
            )
            # Servers of a group stand side by side, each on its own accelerators.
            for i in range(count):
                specs.append(
                    EngineSpec(
                        index=len(specs),
                        model_path=model.model_path,
                        model=model.name,
                        worker_type=group.worker_type,
                        slot=slot + i * group.num_gpus_per_engine,
                        num_gpus=group.num_gpus_per_engine,
                        updates=model.name == updated,
                        options=dict(group.overrides),
                    )
                )
            # also for a placeholder group, which reserves its GPUs and starts no server
            slot += group.num_gpus
    return specs


def engine_count(args: Args) -> int:
    """Return the number of engines behind the first router that decode. Prefill-only engines are
    not counted.
    """
    if args.rollout_external_engine_addrs:
        return len(args.rollout_external_engine_addrs)
    specs = plan_engines(args)
    decode = (spec.model == specs[0].model and spec.worker_type != "prefill" for spec in specs)
    return max(1, sum(decode))


# Start one engine of a run, of the kind that ``--rollout-backend`` names.


Node = tuple[int, int, str | None]
"""For a server on several nodes: the rank of this node, the number of nodes, and the rendezvous
(host:port).
"""


class RunningEngine(Protocol):
    """What a registered engine's ``start`` returns, at once;
    :class:`~slime.engines.process.EngineProcess` is one.

    Attributes:
        url: Where the engine answers SGLang's native HTTP requests.
        pid: The id of the process that ends with the engine.
        fate: Why the engine was ended by its own watch; empty if it was not.
        bootstrap_port: The port at which a prefill server hands over its KV cache; None for others.
    """

    url: str
    pid: int
    fate: str
    bootstrap_port: int | None

    def wait_ready(self, deadline: float) -> None:
        """Wait until it answers; raises :class:`~slime.engines.process.ServerFailed` if it does not
        in this time.
        """

    def alive(self) -> bool: ...

    def log_tail(self) -> str:
        """Return the end of the engine's log, for error messages."""

    def cpu_seconds(self) -> float: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...


def start_engine(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str = "127.0.0.1",
    log_path: str | Path | None = None,
    gpu_ids: Sequence[int] | None = None,
    node: Node = (0, 1, None),
) -> RunningEngine:
    """Start the server of ``spec``, or the part of it that runs on one node.

    The function returns immediately; :meth:`RunningEngine.wait_ready` waits until the server is up.

    The server ends when the calling process ends, even if the caller is killed. For SGLang this is
    the task of a guard process (:mod:`slime.engines.guard`), so the ``pid`` of the result is that
    of the guard. SGLang's own child processes end with their parent.

    Args:
        gpu_ids: The GPUs that the server may see. With None, ``CUDA_VISIBLE_DEVICES`` is not
            changed.
    """
    if settings.fp8 is not None and spec.updates:
        settings, spec = _quantized(settings, spec)
    engine: RunningEngine = find("engine", settings.backend)(
        settings, spec, host, log_path, gpu_ids, node
    )
    return engine


def _quantized(settings: EngineSettings, spec: EngineSpec) -> tuple[EngineSettings, EngineSpec]:
    """Let a server load a quantized copy of its checkpoint, which is written on this node at the
    first start.

    The parameters of the server then have the layout of the quantized weights that updates send.
    """
    from slime.models.fp8 import fp8_folder

    assert settings.fp8 is not None
    folder = str(fp8_folder(spec.model_path, settings.fp8, settings.dtype))
    return replace(settings, model=folder), replace(spec, model_path=folder)
