"""The settings of engines and routers, taken from the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from slime.config.cluster import inline_engine
from slime.config.engine import EngineConfig
from slime.config.hf_config import model_config
from slime.config.lora import engine_adapter, sglang_targets
from slime.config.passthrough import KEYS, ROUTER_DEFAULTS, command_line
from slime.config.rollout import samples_whole_vocabulary
from slime.engines.keys import NO_KEYS, RunKeys, ServerKeys
from slime.models.fp8_format import Fp8Format

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.models.fp8_format import Granularity


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started. None means the default of the server.

    Attributes:
        model: ``--hf-checkpoint``, a folder or a hub id.
        backend: ``embedded`` or ``sglang``.
        dtype: The dtype of the weights, for example ``bfloat16``.
        device, max_running_requests, max_total_tokens: For the embedded engine only; SGLang has its own flags for them.
        threads: The number of CPU threads of a server process.
        seed: SGLang engine ``i`` is started with the seed ``seed + i``, for requests that have no seed.
        offload: Whether the engine releases its GPU memory while the trainer works.
        colocated: Whether the trainer uses the engine's GPUs.
        return_routed_experts: Whether responses contain the experts to which each token was routed.
        updates_by_delta: Whether weight updates are published deltas, for which SGLang needs a custom loader.
        fp8: How the weights are quantized (``--rollout-quantization fp8``); None if they are not.
        sglang: The given ``--sglang-…`` options, by attribute name, without keys.
        keys: The keys that the engine asks for; see :mod:`slime.engines.keys`.
        whole_vocabulary: Whether no flag asks for top-p or top-k sampling.
        adapter_rank: The rank of the adapters that an SGLang engine shall load by name; 0 for none.
        adapter_targets: The projections that these adapters may change.
        inline: Whether the embedded engine runs on threads of this process: ``port`` with a port as well, ``None`` in a
            process of its own.
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
    updates_by_delta: bool = False
    fp8: Fp8Format | None = None
    sglang: Mapping[str, object] = field(default_factory=dict)
    keys: ServerKeys = NO_KEYS
    whole_vocabulary: bool = False
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    inline: Literal["no port", "port"] | None = None

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
            trust_remote_code=bool(args.trust_remote_code),
            seed=int(args.rollout_seed),
            offload=bool(args.offload_rollout),
            colocated=args.colocate,
            return_routed_experts=bool(args.use_rollout_routing_replay),
            updates_by_delta=args.update_weight_mode == "delta",
            fp8=fp8_format(args),
            sglang={name: value for name, value in args.sglang.items() if name not in KEYS},
            keys=keys,
            whole_vocabulary=samples_whole_vocabulary(args),
            adapter_rank=args.lora_rank if named is not None else 0,
            adapter_targets=tuple(sglang_targets(args.lora_target_modules)) if named is not None else (),
            inline=inline_engine(args),
        )


def fp8_format(args: Args) -> Fp8Format | None:
    """Return how the weights of engines are quantized (``--rollout-quantization``); None if they are not."""
    if args.rollout_quantization is None:
        return None
    granularity = cast("Granularity", args.rollout_quantization_scale)
    if args.rollout_backend != "sglang":
        return Fp8Format(granularity)
    config = model_config(args.hf_checkpoint)
    heads = int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)
    return Fp8Format(granularity, args.rollout_num_gpus_per_engine, heads)


@dataclass(frozen=True)
class RouterSettings:
    """How a router is started, or the address of a router that runs already.

    Attributes:
        request_seconds: The time limit of the router for a request.
        options: The given ``--router-…`` options, by attribute name, without keys.
        address: Host and port of a running router for the first model. With None, slime starts that router too.
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
        return command_line("router", {**ROUTER_DEFAULTS, **self.options})

    @classmethod
    def from_args(cls, args: Args, keys: RunKeys | None = None) -> RouterSettings:
        keys = keys or RunKeys()
        address = None
        if args.sglang_router_ip and args.sglang_router_port is not None:
            address = args.sglang_router_ip, args.sglang_router_port
        options = {name: value for name, value in args.router.items() if name not in KEYS}
        control = tuple(map(str, args.router.get("control_plane_api_keys") or ()))
        seconds = args.sglang_router_request_timeout_secs
        return cls(seconds, options, address, keys.router, keys.external_router, control)
