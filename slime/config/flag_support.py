"""Flags that slime refuses, that have no effect, or that do not exist, with the reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slime.config.flag import Flag, shown
from slime.registry import find, parts


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


def why_missing(option: str) -> str | None:
    """Explain why a flag does not exist; None if no registered part knows.

    Args:
        option: The flag with its ``--``; ``_`` and ``-`` are equivalent.
    """
    known = (find("missing flag", name) for name in parts("missing flag"))
    reasons = (reason(option.replace("_", "-")) for reason in known)
    return next(filter(None, reasons), None)
