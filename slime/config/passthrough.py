"""Flags that belong to SGLang (``--sglang-*``), its router (``--router-*``) and Megatron (their own names).

What exists is read from generated tables, one per pinned version (``tools/generate_flag_tables.py``), so that
parsing never imports any of them. What was given lands in ``args.sglang``, ``args.router``, ``args.megatron``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.config.flag import Flag, Kind, Loose
from slime.config.megatron_lm import ALIASES

Family = Literal["sglang", "router", "megatron"]
FAMILIES: tuple[Family, ...] = ("sglang", "router", "megatron")
TABLES = Path(__file__).parent / "tables"
SGLANG_VERSIONS = ("0.5.23", "0.5.15.post1")  # newest first
ROUTER_VERSION = "0.3.2"
MEGATRON_VERSION = "0.16.1"

SET_BY_SLIME: dict[str, str] = {
    **dict.fromkeys(("model_path", "tokenizer_path"), "it follows from --hf-checkpoint"),
    **dict.fromkeys(
        ("tp_size", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step"),
        "use --rollout-num-gpus-per-engine",
    ),
    **dict.fromkeys(("host", "port", "nccl_port"), "slime takes free ports"),
    "config": "pass the flags themselves",
    "trust_remote_code": "use --trust-remote-code",
    "random_seed": "use --rollout-seed",
    "enable_memory_saver": "it follows from --offload-rollout",
    "skip_server_warmup": "slime does the warm-up",
    "enable_return_routed_experts": "use --use-rollout-routing-replay",
}
ROUTER_SET_BY_SLIME: dict[str, str] = {
    **dict.fromkeys(("host", "port"), "use --sglang-router-ip and --sglang-router-port"),
    "worker_urls": "slime registers its engines",
    "request_timeout_secs": "use --sglang-router-request-timeout-secs",
}
_NO_KEY = "slime's own requests carry no key, so each would be refused; keep the ports on a private network"
_NO_TLS = "slime's own requests are plain HTTP; keep the ports on a private network"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("api_key", "admin_api_key"), _NO_KEY),
    **dict.fromkeys(
        ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "enable_ssl_refresh"), _NO_TLS
    ),
}
"""Options of SGLang with which no run could work."""
ROUTER_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("api_key", "control_plane_api_keys", "jwt_issuer", "jwt_audience", "jwt_jwks_uri", "jwt_role_mapping"), _NO_KEY
    ),
    **dict.fromkeys(("tls_cert_path", "tls_key_path"), _NO_TLS),
}
ROUTER_DEFAULTS: dict[str, Any] = {
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
    "cb_timeout_duration_secs": 5,
}

_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "loose": Loose, "count": Loose}


@dataclass(frozen=True)
class PassOption:
    """One pass-through option, e.g. ``--sglang-mem-fraction-static``."""

    family: Family
    flag: Flag  # flag.name is the owner's own attribute name
    sets: bool | None = None  # what a switch sets
    versions: tuple[str, ...] = ()


@functools.cache
def load_table(package: str, version: str) -> dict[str, dict[str, Any]]:
    """The options of one pinned package, as generated."""
    table: dict[str, dict[str, Any]] = json.loads((TABLES / f"{package}-{version}.json").read_text())["options"]
    return table


@functools.cache
def options() -> dict[str, PassOption]:
    """Every pass-through option by its spelling on the command line."""
    return {
        **_megatron_options(),
        **_server_options("router", "sglang_router", (ROUTER_VERSION,)),
        **_server_options("sglang", "sglang", SGLANG_VERSIONS),
    }


@functools.cache
def by_name(family: Family) -> dict[str, PassOption]:
    """The options of a family by attribute name (the first spelling where there are several)."""
    found: dict[str, PassOption] = {}
    for option in options().values():
        if option.family == family:
            found.setdefault(option.flag.name, option)
    return found


def _server_options(family: Family, package: str, versions: tuple[str, ...]) -> dict[str, PassOption]:
    found: dict[str, PassOption] = {}
    for version in versions:
        for spelling, entry in load_table(package, version).items():
            option = f"--{family}-{spelling[2:]}"
            known = found.get(option)
            if known is not None:
                found[option] = PassOption(family, known.flag, known.sets, (*known.versions, version))
                continue
            flag = _flag(option, entry["dest"], entry["kind"], entry.get("type", "str"), entry.get("default"), family)
            sets = {"switch": True, "negative": False}.get(entry["kind"])
            found[option] = PassOption(family, flag, sets, (version,))
    return found


def _megatron_options() -> dict[str, PassOption]:
    found: dict[str, PassOption] = {}
    covered = {alias.field for alias in ALIASES if alias.field} | {alias.dest for alias in ALIASES}
    for name, entry in load_table("megatron_core", MEGATRON_VERSION).items():
        if name in covered:
            continue
        option = "--" + name.replace("_", "-")
        flag = _flag(
            option,
            name,
            entry["kind"],
            entry.get("type", "str"),
            entry.get("default"),
            "megatron",
            entry.get("choices", ()),
        )
        found[option] = PassOption("megatron", flag, True if flag.is_bool else None)
        if flag.is_bool:
            found[f"--no-{option[2:]}"] = PassOption("megatron", flag, False)
    for alias in ALIASES:
        flag = _flag(alias.option, alias.dest, alias.kind, alias.value_type, alias.default, "megatron")
        found[alias.option] = PassOption("megatron", flag, {"switch": True, "negative": False}.get(alias.kind))
    return found


def _flag(option: str, name: str, kind: Kind, value_type: str, default: Any, group: str, choices: Any = ()) -> Flag:
    is_bool = kind in ("switch", "negative", "toggle")
    return Flag(name, option, kind, bool if is_bool else _TYPES[value_type], default, "", group, choices=tuple(choices))


def option_value(name: str, attributes: Mapping[str, Any]) -> tuple[bool, Any]:
    """What ``args.<name>`` is for a pass-through option: ``(found, value)``. Defaults of Megatron's options are found
    only with its backend."""
    for family in FAMILIES:
        prefix = "" if family == "megatron" else f"{family}_"
        short = name.removeprefix(prefix)
        if not name.startswith(prefix):
            continue
        given = attributes.get(family) or {}
        if short in given:
            return True, given[short]
        known = by_name(family).get(short)
        if known is not None and (family != "megatron" or attributes.get("train_backend") == "megatron"):
            defaults = ROUTER_DEFAULTS if family == "router" else {}
            return True, defaults.get(short, known.flag.default)
    return False, None


def installed_sglang() -> str | None:
    """Version of the installed SGLang; imports nothing of it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def sglang_table_version(version: str | None = None) -> str:
    """The pinned version whose table describes this SGLang."""
    installed = version or installed_sglang()
    return installed if installed in SGLANG_VERSIONS else SGLANG_VERSIONS[0]


def check(args: Any) -> list[str]:
    """Pass-through flags that slime sets itself, or that the installed SGLang does not have."""
    problems = []
    for name in args.sglang:
        if name in SET_BY_SLIME:
            problems.append(f"--sglang-{name.replace('_', '-')} is set by slime: {SET_BY_SLIME[name]}")
        elif name in REFUSED:
            problems.append(f"--sglang-{name.replace('_', '-')} is not supported: {REFUSED[name]}")
    for name in args.router:
        if name in ROUTER_REFUSED:
            problems.append(f"--router-{name.replace('_', '-')} is not supported: {ROUTER_REFUSED[name]}")
        if name in ROUTER_SET_BY_SLIME:
            problems.append(f"--router-{name.replace('_', '-')} is set by slime: {ROUTER_SET_BY_SLIME[name]}")
    if args.sglang and args.rollout_backend == "embedded":
        given = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in sorted(args.sglang))
        args.notices.append(f"{given}: no effect: the embedded engine generates (--rollout-backend)")
    if args.rollout_backend == "sglang" and installed_sglang() in SGLANG_VERSIONS:
        problems += _absent_in(args.sglang, sglang_table_version())
    return problems


def _absent_in(given: Mapping[str, Any], version: str) -> list[str]:
    known = {entry["dest"] for entry in load_table("sglang", version).values()}
    return [
        f"--sglang-{name.replace('_', '-')}: another SGLang has it, the installed {version} has not"
        for name in given
        if name not in known
    ]


def command_line(family: Family, given: Mapping[str, Any], version: str | None = None) -> list[str]:
    """The words that pass ``given`` to the owner's own command line.

    >>> command_line("sglang", {"mem_fraction_static": 0.7, "disable_radix_cache": True})
    ['--mem-fraction-static', '0.7', '--disable-radix-cache']
    """
    version = version or (sglang_table_version() if family == "sglang" else ROUTER_VERSION)
    table = load_table("sglang" if family == "sglang" else "sglang_router", version)
    spelling: dict[str, str] = {}
    for option, entry in sorted(table.items(), key=lambda item: item[0] != "--" + item[1]["dest"].replace("_", "-")):
        spelling.setdefault(entry["dest"], option)
    words: list[str] = []
    for name, value in given.items():
        option = spelling.get(name) or "--" + name.replace("_", "-")  # one without a table: its owner says what it is
        if isinstance(value, bool):
            entry = table.get(option, {"kind": "switch"})
            is_default = value == bool(entry.get("default", entry["kind"] == "negative"))
            words += [] if is_default else [option]
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words
