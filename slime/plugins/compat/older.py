"""What scripts of older releases and of other frameworks expect: flags that are gone, other defaults,
and environment variables that slime does not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.args import FLAGS
from slime.config.files import read_json
from slime.config.flag import flags_of
from slime.plugins.compat.frameworks import tables

if TYPE_CHECKING:
    from slime.config.args import Args

_TABLE = read_json(Path(__file__).with_name("older.json"))
GONE: dict[str, str] = _TABLE["gone"]
"""Flags of older releases, and what to use instead."""
OTHER_FRAMEWORKS: dict[str, str] = _TABLE["other_frameworks"]
"""Prefixes of flags of other frameworks, and why slime has no such flag."""
FORKS: dict[str, tuple[str, str]] = _TABLE["forks"]
"""Prefixes of flags of forks, each with the fork and what to use, or what the flag would need."""
ORIGINAL_DEFAULTS: dict[str, object] = _TABLE["original_defaults"]
"""Defaults of slime 0.3 that change results and are not those of this version, by attribute."""
UNREAD_VARIABLES: dict[str, str] = _TABLE["variables"]
"""Environment variables of older releases that have no effect, and why."""


def why_missing(option: str) -> str | None:
    """Explain why a flag does not exist; None if it was never removed and is not known from another
    framework or a fork.

    Args:
        option: The flag with its ``--`` and with ``-`` between its words.
    """
    if option in GONE:
        return f"was removed: {GONE[option]}"
    reason = next(
        (reason for start, reason in OTHER_FRAMEWORKS.items() if option.startswith(start)), None
    )
    if reason:
        return f"does not exist: {reason}"
    of_fork = next((entry for start, entry in FORKS.items() if option.startswith(start)), None)
    if of_fork:
        return f"is a flag of {of_fork[0]}, a fork of slime: {of_fork[1]}"
    # A similar name would mislead: --learning-rate is --lr, and not an option of an engine.
    name = option[2:].replace("-", "_")
    for framework, table in tables().items() if name not in FLAGS else ():
        if meaning := table["flags"].get(f"--{name}"):
            short = meaning if " " in meaning else meaning.partition(":")[0]
            return f"is a flag of {framework}; in slime: {short}"
    return None


def tell(args: Args) -> list[str]:
    """Add what a script of an older release may rely on to the notices of a run. Nothing is a
    problem.
    """
    args.notices.extend([*unread_variables(os.environ), *other_defaults(args)])
    return []


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Describe each environment variable that is set but that slime does not read."""
    found = []
    for name in sorted(environment):
        of_prefix = (
            reason
            for prefix, reason in _TABLE["variable_prefixes"].items()
            if name.startswith(prefix)
        )
        reason = UNREAD_VARIABLES.get(name) or next(of_prefix, None)
        if reason:
            found.append(f"environment variable {name} has no effect: {reason}")
    return found


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
