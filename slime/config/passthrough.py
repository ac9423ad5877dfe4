"""Flags that belong to SGLang (``--sglang-*``), its router (``--router-*``) and Megatron (their own
names).

The options are read from tables of the pinned versions, so that parsing never imports these
packages. ``tools/generate_flag_tables.py`` generates all tables except that of Megatron-LM, which
lists the flags that have no config field in megatron-core, or one of another name (``field``). The
values that the user sets are stored in ``args.sglang``, ``args.router`` and ``args.megatron``.
A plug-in whose engine has options of its own registers an :class:`EngineOptions`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Required, TypedDict

from slime.config.files import read_json, read_table
from slime.config.flag import Flag, Kind, Loose
from slime.config.machine import version_of
from slime.registry import load, parts

if TYPE_CHECKING:
    from slime.config.args import Args


SGLANG_VERSIONS = ("0.5.23", "0.5.15.post1")  # newest first
ROUTER_VERSION = "0.3.2"
MEGATRON_VERSION = "0.16.1"

REASONS: dict[str, dict[str, dict[str, str]]] = read_table("passed_on.json")
"""Options that slime refuses by family and status, each with the reason: ``set by slime`` itself,
or ``not supported`` because slime's own requests would fail with them."""
KEYS = frozenset(("api_key", "admin_api_key", "control_plane_api_keys"))
"""Options that slime does not pass on a command line; see :mod:`slime.engines.keys`."""
ROUTER_DEFAULTS: dict[str, object] = {
    "policy": "cache_aware",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
    # The circuit breaker counts 4xx responses as failures, so a series of invalid requests excludes
    # all engines. The timeout is short, so that this lasts seconds and not a minute. The price: a
    # bad engine is tried again sooner, which costs a few retries each time.
    "cb_timeout_duration_secs": 5,
}
"""Defaults of slime for options of the router; ``--router-…`` flags replace them."""

_TYPES: dict[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "loose": Loose,
    "count": Loose,
}


class TableEntry(TypedDict, total=False):
    """One option in a table."""

    kind: Required[Kind]
    # the attribute name in the package; absent if the key of the entry is the attribute name
    dest: str
    type: str
    default: object
    choices: list[str | int]
    field: str  # the megatron-core config field that this option of Megatron-LM sets


@dataclass(frozen=True)
class PassOption:
    """One pass-through option, e.g. ``--sglang-mem-fraction-static``."""

    family: str
    flag: Flag  # flag.name is the attribute name in the package that owns the option
    sets: bool | None = None  # the value that a switch sets; None for other kinds


@dataclass(frozen=True)
class EngineOptions:
    """The options of a registered engine's server, for flags that begin with the engine's name.

    Attributes:
        table: The JSON file of the options, as ``tools/generate_flag_tables.py`` writes it.
        reasons: Options that slime refuses, as in :data:`REASONS`.
        context_length: The option for the most tokens of prompt and response. A value that is no
            whole number leaves it to the model.
    """

    table: Path
    reasons: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    context_length: str = "context_length"

    @property
    def version(self) -> str:
        return str(read_json(self.table)["version"])

    @property
    def entries(self) -> dict[str, TableEntry]:
        entries: dict[str, TableEntry] = read_json(self.table)["options"]
        return entries


def engine_options() -> dict[str, EngineOptions]:
    """Return the options of registered engines by the names of the engines."""
    return {name: load(part.target) for name, part in parts("options").items()}


def families() -> tuple[str, ...]:
    """Return the owners of options. The prefix of Megatron is empty, so it comes last."""
    return ("sglang", "router", *parts("options"), "megatron")


def load_table(package: str, version: str) -> dict[str, TableEntry]:
    """Load the table of options of a pinned package."""
    table: dict[str, TableEntry] = read_table(f"{package}-{version}.json")["options"]
    return table


@functools.cache
def options() -> dict[str, PassOption]:
    """Return all pass-through options by their spelling on the command line."""
    return {
        **_megatron_options(),
        **_server_options("router", [load_table("sglang_router", ROUTER_VERSION)]),
        **_server_options("sglang", [load_table("sglang", v) for v in SGLANG_VERSIONS]),
        **{
            spelling: option
            for name, own in engine_options().items()
            for spelling, option in _server_options(name, [own.entries]).items()
        },
    }


def prefix_of(family: str) -> str:
    """Return what the names of a family's options begin with in ``args`` and in files; Megatron's
    have no prefix.
    """
    return "" if family == "megatron" else f"{family}_"


@functools.cache
def by_name(family: str) -> dict[str, PassOption]:
    """Return the options of a family by attribute name; if an attribute has several spellings, the
    first.
    """
    found: dict[str, PassOption] = {}
    for option in options().values():
        if option.family == family:
            found.setdefault(option.flag.name, option)
    return found


def _server_options(
    family: str, tables: Sequence[Mapping[str, TableEntry]]
) -> dict[str, PassOption]:
    """Return the options of a server from the tables of its versions, newest first. Where versions
    differ, the newest one says what an option is.
    """
    found: dict[str, PassOption] = {}
    for spelling, entry in itertools.chain.from_iterable(table.items() for table in tables):
        option = f"--{family}-{spelling[2:]}"
        # The table lists both spellings of a toggle as one.
        off = entry["kind"] == "toggle" and spelling.startswith("--no-")
        sets = False if off else _SETS.get(entry["kind"])
        made = PassOption(family, _flag(option, entry["dest"], entry, family), sets)
        found.setdefault(option, made)
    return found


def _megatron_options() -> dict[str, PassOption]:
    found: dict[str, PassOption] = {}
    own = load_table("megatron_lm", MEGATRON_VERSION)
    # An option of Megatron-LM replaces the field of megatron-core that it sets, under its own name.
    covered = {entry["dest"] for entry in own.values()} | {
        entry.get("field") for entry in own.values()
    }
    for name, entry in load_table("megatron_core", MEGATRON_VERSION).items():
        if name in covered:
            continue
        option = "--" + name.replace("_", "-")
        flag = _flag(option, name, entry, "megatron")
        found[option] = PassOption("megatron", flag, True if flag.is_bool else None)
        if flag.is_bool:
            found[f"--no-{option[2:]}"] = PassOption("megatron", flag, False)
    for option, entry in own.items():
        flag = _flag(option, entry["dest"], entry, "megatron")
        found[option] = PassOption("megatron", flag, _SETS.get(entry["kind"]))
    return found


_SETS: dict[Kind, bool] = {"switch": True, "negative": False}


def _flag(option: str, name: str, entry: TableEntry, group: str) -> Flag:
    kind = entry["kind"]
    value_type = (
        bool if kind in ("switch", "negative", "toggle") else _TYPES[entry.get("type", "str")]
    )
    choices = tuple(entry.get("choices", ()))
    return Flag(name, option, kind, value_type, entry.get("default"), group, fixed_choices=choices)


def option_value(name: str, attributes: Mapping[str, object]) -> tuple[bool, object]:
    """Look up ``args.<name>`` as a pass-through option; returns ``(found, value)``. Defaults of
    Megatron's options are found only with ``--train-backend megatron``, those of parallel sizes
    always."""
    for family in families():
        short = name.removeprefix(prefix_of(family))
        if not name.startswith(prefix_of(family)):
            continue
        given = attributes.get(family)
        if isinstance(given, dict) and short in given:
            return True, given[short]
        known = by_name(family).get(short)
        # FSDP has one rank on each of Megatron's axes, as the defaults say.
        if known is not None and (
            family != "megatron"
            or attributes.get("train_backend") == "megatron"
            or "parallel_size" in short
        ):
            defaults = ROUTER_DEFAULTS if family == "router" else {}
            return True, defaults.get(short, known.flag.default)
    return False, None


def given_options(args: Args) -> dict[str, object]:
    """Return the options that were given for the engine of the run; none if it has no own ones."""
    options: dict[str, object] = vars(args).get(args.rollout_backend, {})
    return {name: value for name, value in options.items() if name not in KEYS}


def installed_sglang() -> str | None:
    """Return the version of the installed SGLang without importing it; None if it is not
    installed.
    """
    return version_of("sglang")


def sglang_table_version() -> str:
    """Return the pinned version whose table is used for the installed SGLang; the newest one if
    that is not pinned.
    """
    installed = installed_sglang()
    return installed if installed in SGLANG_VERSIONS else SGLANG_VERSIONS[0]


def check(args: Args) -> list[str]:
    """Report pass-through flags that slime sets itself, that cannot work, or that the installed
    SGLang lacks.
    """
    problems = [
        f"--{family}-{name.replace('_', '-')} is {status}: {reasons[name]}"
        for family, refused in all_reasons().items()
        for status, reasons in refused.items()
        for name in vars(args)[family]
        if name in reasons
    ]
    problems += _check_keys(args)
    # Keys are for all engines; all other options are those of one engine.
    for family in {"sglang", *parts("options")} - {args.rollout_backend}:
        if idle := sorted(vars(args)[family].keys() - KEYS):
            given = ", ".join(f"--{family}-{name.replace('_', '-')}" for name in idle)
            args.notices.append(f"{given}: no effect with --rollout-backend {args.rollout_backend}")
    if args.rollout_backend == "sglang" and installed_sglang() in SGLANG_VERSIONS:
        version = sglang_table_version()
        known = {entry["dest"] for entry in load_table("sglang", version).values()}
        problems += [
            f"--sglang-{name.replace('_', '-')}: the installed SGLang {version} does not have "
            "this option"
            for name in args.sglang
            if name not in known
        ]
    return problems


def all_reasons() -> dict[str, Mapping[str, Mapping[str, str]]]:
    """Return the :data:`REASONS` of SGLang and the router, and those of registered engines."""
    own = {name: options.reasons for name, options in engine_options().items()}
    return {"sglang": REASONS["sglang"], "router": REASONS["router"], **own}


def keyless_options(given: Mapping[str, object]) -> list[str]:
    """Return those of ``given`` SGLang options with which SGLang accepts no keys, as flags."""
    found = [name for name in ("grpc_port", "grpc_mode", "smg_grpc_mode") if given.get(name)]
    if int(str(given.get("tokenizer_worker_num") or 1)) > 1:
        found.append("tokenizer_worker_num")
    return [f"--sglang-{name.replace('_', '-')}" for name in found]


def _check_keys(args: Args) -> list[str]:
    """Report keys of servers with which requests would fail, and engines that have no key."""
    problems = []
    engine = args.sglang.get("api_key")
    if args.rollout_backend == "sglang" and (options := ", ".join(keyless_options(args.sglang))):
        if engine or args.sglang.get("admin_api_key"):
            problems.append(
                f"--sglang-api-key, --sglang-admin-api-key: SGLang accepts no key with {options}"
            )
        else:
            args.notices.append(
                f"{options}: the engines have no key, so everyone who reaches their ports can use "
                "them"
            )
    return problems


# The command line of a server: the options that the user gave, in the spelling of their owner.


def command_line(family: str, given: Mapping[str, object], version: str | None = None) -> list[str]:
    """Return the command-line words that pass ``given`` to the package that owns the options.

    >>> command_line("sglang", {"mem_fraction_static": 0.7, "disable_radix_cache": True})
    ['--mem-fraction-static', '0.7', '--disable-radix-cache']
    """
    if family in ("sglang", "router"):
        version = version or (sglang_table_version() if family == "sglang" else ROUTER_VERSION)
        table = load_table("sglang" if family == "sglang" else "sglang_router", version)
    else:
        table = engine_options()[family].entries
    # Of several spellings, the one that is the name of the attribute comes first.
    spelling: dict[str, str] = {}
    for option, entry in sorted(
        table.items(), key=lambda item: item[0] != "--" + item[1]["dest"].replace("_", "-")
    ):
        spelling.setdefault(entry["dest"], option)
    words: list[str] = []
    for name, value in given.items():
        # not in the table: the owner rejects or takes it
        option = spelling.get(name) or "--" + name.replace("_", "-")
        if isinstance(value, bool):
            entry = table.get(option, {"kind": "switch"})
            toggle = entry["kind"] == "toggle"  # without a default, it is None: the package decides
            default = (
                entry.get("default")
                if toggle
                else bool(entry.get("default", entry["kind"] == "negative"))
            )
            words += (
                []
                if value == default
                else [f"--no-{option[2:]}" if toggle and not value else option]
            )
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words
