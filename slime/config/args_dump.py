"""The resolved configuration as YAML, for ``outputs/<run>/config.yaml``."""

from __future__ import annotations

from typing import Any

import yaml

from slime.config.args import FLAGS, Args

SECRET = ("wandb_key",)


def to_dict(args: Args) -> dict[str, Any]:
    """Every flag at its resolved value, the pass-through flags that were given, and what hooks set.

    The mapping is also a valid ``--override`` file, apart from what is derived (``use_critic``, ``world_size``).
    """
    values = vars(args)
    known: dict[str, Any] = {name: _hidden(name, values[name]) for name in FLAGS}
    passed = {
        **{f"sglang_{name}": value for name, value in args.sglang.items()},
        **{f"router_{name}": value for name, value in args.router.items()},
        **args.megatron,
    }
    skip = {"sglang", "router", "megatron", "notices", "explicit", "override", *known}
    others = {name: value for name, value in values.items() if name not in skip and _plain(value)}
    known.pop("override")
    return {**known, **passed, **others}


def to_yaml(args: Args) -> str:
    """:func:`to_dict` as YAML text, in the order of the reference page; secrets are left out."""
    head = "".join(f"# {notice}\n" for notice in args.notices)
    return head + yaml.safe_dump(to_dict(args), sort_keys=False, allow_unicode=True)


def _hidden(name: str, value: Any) -> Any:
    return None if name in SECRET else value


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
