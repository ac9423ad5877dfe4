"""Interface that slime does not support, with the reasons: flags that are refused or have no
effect, flags that were removed or belong to other frameworks, and environment variables that slime
does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.files import read_table
from slime.config.flag import Flag, Section, flag, flags_of, shown

if TYPE_CHECKING:
    from slime.config.args import Args

_TYPES: dict[str, Any] = {"list of int": list[int], "list of str": list[str]}
_TYPES |= {kind.__name__: kind for kind in (int, float, str, bool)}


def _unsupported() -> type:
    """Make the flags of the original interface that slime refuses or ignores. They remain
    attributes of Args.
    """
    table: dict[str, dict[str, Any]] = read_table("unsupported.json")
    fields = [
        (
            name,
            _TYPES[entry["type"]],
            flag(**{key: value for key, value in entry.items() if key != "type"}),
        )
        for name, entry in table.items()
    ]
    return dataclasses.make_dataclass(
        "UnsupportedConfig", fields, bases=(Section,), namespace={"_title": "not supported"}
    )


UnsupportedConfig = _unsupported()


def check_states(
    values: object, explicit: Collection[str], flags: Mapping[str, Flag]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the problems of refused flags that the user set, and each flag without effect with the
    reason.
    """
    problems: list[str] = []
    idle: list[tuple[str, str]] = []
    for name, entry in flags.items():
        value = getattr(values, name)
        if name not in explicit or value in (None, entry.default):
            continue
        words = value if isinstance(value, str) else shown(value)
        typed = entry.option if entry.is_bool or entry.takes_list else f"{entry.option} {words}"
        if entry.status == "notice":
            idle.append((typed, entry.reason))
        elif entry.status == "refused":
            problems.append(f"{typed} is not supported: {entry.reason}")
    return problems, idle


def no_effect_notice(idle: Sequence[tuple[str, str]]) -> list[str]:
    """Return one notice for all flags without effect, or none. Each has the words of the flag and
    the reason.
    """
    if len(idle) < 2:
        return [f"{typed} has no effect: {reason}" for typed, reason in idle]
    return [
        "these flags have no effect:" + "".join(f"\n  {typed}: {reason}" for typed, reason in idle)
    ]


def other_defaults(args: Args) -> list[str]:
    """Return a notice that names the defaults in use that are others than those of slime 0.3, if
    MODEL_ARGS were given:
    then the flags are probably those of a launch script that was written for it."""
    if "num_layers" not in args.megatron:
        return []
    flags = flags_of(type(args))
    different = [
        f"{flags[name].option} {getattr(args, name)} (was "
        f"{'not limited' if value is None else value})"
        for name, value in ORIGINAL_DEFAULTS.items()
        if name not in args.explicit and getattr(args, name) != value and _is_used(args, name)
    ]
    return (
        [f"defaults that are not those of slime 0.3: {', '.join(different)}"] if different else []
    )


def _is_used(args: Args, name: str) -> bool:
    if name == "kl_loss_type":
        return args.use_kl_loss or args.kl_coef != 0
    return name != "rollout_max_response_len" or not args.debug_train_only


_MISSING = read_table("missing.json")
GONE: dict[str, str] = _MISSING["gone"]
"""Flags of older releases, and what to use instead."""
OTHER_FRAMEWORKS: dict[str, str] = _MISSING["other_frameworks"]
"""Prefixes of flags of other frameworks, and why slime has no such flag."""
ORIGINAL_DEFAULTS: dict[str, object] = _MISSING["original_defaults"]
"""Defaults of slime 0.3 that change results and are not those of this version, by attribute."""
UNREAD_VARIABLES: dict[str, str] = _MISSING["variables"]
"""Environment variables of older releases that have no effect, and why."""


def why_missing(option: str) -> str | None:
    """Explain why a flag does not exist; None if it was never removed and is not known from another
    framework.

    Args:
        option: The flag with its ``--``; ``_`` and ``-`` are equivalent.
    """
    option = option.replace("_", "-")
    if option in GONE:
        return f"was removed: {GONE[option]}"
    reason = next(
        (reason for start, reason in OTHER_FRAMEWORKS.items() if option.startswith(start)), None
    )
    return f"does not exist: {reason}" if reason else None


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Describe each environment variable that is set but that slime does not read."""
    found = []
    for name in sorted(environment):
        of_prefix = (
            reason
            for prefix, reason in _MISSING["variable_prefixes"].items()
            if name.startswith(prefix)
        )
        reason = UNREAD_VARIABLES.get(name) or next(of_prefix, None)
        if reason:
            found.append(f"environment variable {name} has no effect: {reason}")
    return found
