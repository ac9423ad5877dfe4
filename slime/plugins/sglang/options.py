"""The options of SGLang's servers and of its router that the user may give, those that slime refuses,
and which of them exclude keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.files import read_json
from slime.config.passthrough import ProgramOptions

if TYPE_CHECKING:
    from slime.config.args import Args

_HERE = Path(__file__).parent
_REFUSED = read_json(_HERE / "refused.json")
SGLANG = ProgramOptions(
    (_HERE / "options-0.5.23.json", _HERE / "options-0.5.15.post1.json"), _REFUSED["sglang"]
)
ROUTER = ProgramOptions(
    (_HERE / "router.json",),
    _REFUSED["router"],
    {
        "policy": "cache_aware",
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "log_level": "warn",
        # The circuit breaker counts 4xx responses as failures, so a series of invalid requests
        # excludes all engines. The timeout is short, so that this lasts seconds and not a minute.
        # The price: a bad engine is tried again sooner, which costs a few retries each time.
        "cb_timeout_duration_secs": 5,
    },
)


def keyless_options(given: Mapping[str, object]) -> list[str]:
    """Return those of ``given`` SGLang options with which SGLang accepts no keys, as flags."""
    found = [name for name in ("grpc_port", "grpc_mode", "smg_grpc_mode") if given.get(name)]
    if int(str(given.get("tokenizer_worker_num") or 1)) > 1:
        found.append("tokenizer_worker_num")
    return [f"--sglang-{name.replace('_', '-')}" for name in found]


def check_keys(args: Args) -> list[str]:
    """Report keys of servers with which requests would fail, and engines that have no key."""
    options = ", ".join(keyless_options(args.sglang))
    if args.rollout_backend != "sglang" or not options:
        return []
    if args.sglang.get("api_key") or args.sglang.get("admin_api_key"):
        return [f"--sglang-api-key, --sglang-admin-api-key: SGLang accepts no key with {options}"]
    args.notices.append(
        f"{options}: the engines have no key, so everyone who reaches their ports can use them"
    )
    return []
