"""``--megatron-config-path``: a YAML file with other values of flags for the actor or the critic.

critic:
  lr: 1e-5
  recompute_granularity: full
"""

from __future__ import annotations

import copy
from typing import Any

from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.config.overrides import read_yaml, set_value

ROLES = ("actor", "critic")
_IGNORED = ("num_nodes", "num_gpus_per_node")  # both roles have the same places
_OPTION = "--megatron-config-path"


def role_args(args: Args, role: str) -> Args:
    """The arguments of one role; checked by :func:`check_roles` before."""
    return _changed(args, role)[0]


def check_roles(args: Args) -> list[str]:
    """What is wrong with the file, one line each."""
    if not args.megatron_config_path:
        return []
    content, problems = read_yaml(args.megatron_config_path, _OPTION)
    problems += [f"{_OPTION}: {name!r} is no role: {' or '.join(ROLES)}" for name in content if name not in ROLES]
    for role in ROLES:
        changed, wrong = _changed(args, role)
        problems += [f"{_OPTION}: {role}: {problem}" for problem in wrong]
        if not wrong and ParallelLayout.from_args(changed) != ParallelLayout.from_args(args):
            problems.append(f"{_OPTION}: {role} has another layout: both roles share their processes' layout")
    return problems


def _changed(args: Args, role: str) -> tuple[Args, list[str]]:
    if not args.megatron_config_path:
        return args, []
    values: Any = read_yaml(args.megatron_config_path, _OPTION)[0].get(role) or {}
    if not isinstance(values, dict):
        return args, [f"needs a mapping of flag names to values, not a {type(values).__name__}"]
    changed = copy.deepcopy(args)
    told = (set_value(changed, str(name), value) for name, value in values.items() if name not in _IGNORED)
    return changed, [problem for problem in told if problem]
