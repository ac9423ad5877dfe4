"""The resolved configuration as one mapping: what a snapshot remembers, and what repeats a run."""

from __future__ import annotations

from typing import Any

from slime.config.args import FLAGS, Args
from slime.config.secrets import is_secret, redacted


def to_dict(args: Args) -> dict[str, Any]:
    """Every flag at its resolved value, the pass-through flags that were given, and what hooks set.

    The mapping is also a valid ``--override`` file, apart from what is derived (``use_critic``, ``world_size``) and
    from secrets, which are left out.
    """
    values = vars(args)
    known: dict[str, Any] = {name: values[name] for name in FLAGS}
    passed = {
        **{f"sglang_{name}": value for name, value in args.sglang.items()},
        **{f"router_{name}": value for name, value in args.router.items()},
        **args.megatron,
    }
    skip = {"sglang", "router", "megatron", "notices", "explicit", "override", *known}
    others = {name: value for name, value in values.items() if name not in skip and _plain(value)}
    known.pop("override")
    return {name: _shown(name, value) for name, value in {**known, **passed, **others}.items()}


def _shown(name: str, value: Any) -> Any:
    """None for a secret: as an override it means that none is given."""
    return None if is_secret(name) else redacted(name, value)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
