"""Inference servers: the embedded engine, the router, and what SGLang needs besides its own flags."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class EngineConfig:
    _title = "engines and router"

    rollout_dtype: str = flag(
        None,
        choices=("float32", "bfloat16"),
        help="dtype of the engines' weights; default: --train-dtype",
    )
    use_router: bool = flag(False, help="put sglang-router in front of a single engine too")
    embedded_max_running_requests: int = flag(64, low=1, help="requests the embedded engine decodes together")
    embedded_max_total_tokens: int = flag(None, low=1, help="tokens in its KV cache; default: by memory")
    embedded_device: str = flag(None, help="cpu or cuda; default: cuda where there is one")
    sglang_router_ip: str = flag(None, help="use a router that runs already")
    sglang_router_port: int = flag(None, low=1, high=65535, help="its port")
    sglang_router_request_timeout_secs: int = flag(14400, low=1, help="the router gives a request up after this")
    sglang_server_concurrency: int = flag(512, low=1, help="requests in flight per engine")
    rollout_external_engine_addrs: list[str] | None = flag(
        None,
        help="host:port of servers that run already: they get weights and requests, and are never stopped",
    )
    sglang_config: str = flag(
        None,
        kind="path",
        help="YAML of several models, or of groups of servers that prefill and decode",
    )
    prefill_num_servers: int = flag(None, low=1, help="so many of the SGLang servers only prefill, the others decode")
    logprob_gap_threshold: float = flag(
        None,
        low=0,
        help="warn when trainer and engine log-probs differ by more in a step's mean; default: by dtype",
    )
