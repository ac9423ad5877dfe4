"""Inference servers: the embedded engine, the router, and what SGLang needs besides its own flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import DERIVED, flag
from slime.config.hf_config import MTP_COUNTS, read_config

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class EngineConfig:
    _title = "engines and router"

    rollout_dtype: str = flag(
        DERIVED,
        choices=("float32", "bfloat16"),
        help="dtype of the engines' weights; default: --train-dtype",
    )
    use_router: bool = flag(False, help="put sglang-router in front of a single engine too")
    embedded_max_running_requests: int = flag(64, low=1, help="requests the embedded engine decodes together")
    embedded_max_total_tokens: int | None = flag(None, low=1, help="tokens in its KV cache; default: by memory")
    embedded_device: str = flag(DERIVED, help="cpu or cuda; default: cuda where there is one")
    sglang_router_ip: str | None = flag(None, help="use a router that runs already")
    sglang_router_port: int | None = flag(None, low=1, high=65535, help="its port")
    sglang_router_request_timeout_secs: int = flag(14400, low=1, help="the router gives a request up after this")
    sglang_server_concurrency: int = flag(512, low=1, help="requests in flight per engine")
    rollout_external_engine_addrs: list[str] | None = flag(
        None,
        help="host:port of servers that run already: they get weights and requests, and are never stopped",
    )
    sglang_config: str | None = flag(
        None,
        kind="path",
        help="YAML of several models, or of groups of servers that prefill and decode",
    )
    prefill_num_servers: int | None = flag(
        None, low=1, help="so many of the SGLang servers only prefill, the others decode"
    )
    logprob_gap_threshold: float | None = flag(
        None,
        low=0,
        help="warn when trainer and engine log-probs differ by more in a step's mean; default: by dtype",
    )


def check_draft(args: Args) -> list[str]:
    """Weight updates reach the policy, not the model that drafts for it in speculative decoding."""
    algorithm, draft = args.sglang.get("speculative_algorithm"), args.sglang.get("speculative_draft_model_path")
    trains = args.rollout_backend == "sglang" and not args.debug_rollout_only
    if not trains or not algorithm or str(algorithm).upper() in ("NGRAM", "NONE"):  # which drafts from the text itself
        return []
    config = (read_config(str(args.hf_checkpoint)) if args.hf_checkpoint else None) or {}
    own = draft is None or str(draft) == str(args.hf_checkpoint)
    drafts = "its draft model" if own else f"the draft model {draft}"
    if own and any(config.get(name) for name in MTP_COUNTS):
        drafts = "its draft model, the checkpoint's layers for multi-token prediction,"
    args.notices.append(
        f"--sglang-speculative-algorithm {algorithm}: {drafts} is not trained and keeps the weights that it starts "
        "with, so fewer drafted tokens are accepted as the policy changes (rollout/spec_accept_rate); samples are "
        "not affected, because the policy verifies every token"
    )
    return []
