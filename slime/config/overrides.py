"""YAML files that set flags: ``--custom-config-path`` (before the checks) and ``--override`` (last of all)."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from slime.config.args import FLAGS, Args
from slime.config.flag import Flag, OutOfRange, convert
from slime.config.gone import why_missing
from slime.config.passthrough import FAMILIES, Family, by_name
from slime.config.secrets import HIDDEN
from slime.config.yaml_file import load_yaml

RESERVED = frozenset(
    ("explicit", "notices", "sglang", "router", "megatron", "sglang_model_routers", "use_critic", "world_size")
)
"""Attributes of the arguments that are no flags."""


def read_yaml(path: str, option: str) -> tuple[dict[str, Any], list[str]]:
    """A flat mapping from a file, and what is wrong with it."""
    file = Path(path).expanduser()
    if not file.is_file():
        return {}, [f"{option} {path}: no such file"]
    try:
        content = load_yaml(file)
    except (ValueError, OSError) as error:
        return {}, [f"{option} {path}: {error}"]
    if content is None:
        return {}, []
    if not isinstance(content, dict):
        return {}, [f"{option} {path}: needs a mapping of flag names to values, not a {type(content).__name__}"]
    return content, []


def names_of_flag(flag: Flag) -> set[str]:
    """How a file may spell a flag: by attribute, or by option without the dashes in front."""
    return {flag.name, flag.option[2:].replace("-", "_")}


def apply_file(args: Args, path: str, option: str, new_names: bool) -> list[str]:
    """Set every key of the file on ``args``.

    Args:
        new_names: whether a key that is no flag becomes an attribute, or is a problem.

    Returns:
        Problems, one line each.
    """
    content, problems = read_yaml(path, option)
    if content.keys() >= RESERVED:
        content = _of_a_run(content)
    for key, value in content.items():
        problem = set_value(args, str(key), value, new_names)
        if problem:
            problems.append(f"{option} {path}: {problem}")
    return problems


def _of_a_run(content: dict[str, Any]) -> dict[str, Any]:
    """The settings in the config.yaml of a run: without what was derived and the secrets, which are not in it, and with
    the pass-through flags by their full names."""
    left_out = {*RESERVED, "override"}
    settings = {key: value for key, value in content.items() if key not in left_out and value != HIDDEN}
    for family in FAMILIES:
        prefix = "" if family == "megatron" else f"{family}_"
        given = content[family] if isinstance(content[family], dict) else {}
        settings |= {f"{prefix}{name}": value for name, value in given.items() if value != HIDDEN}
    return settings


def set_value(args: Args, key: str, value: Any, new_names: bool = False) -> str | None:
    """Set one flag by name; returns what is wrong, if anything. None un-sets a pass-through flag."""
    name = key.removeprefix("--").replace("-", "_")
    if name in RESERVED or name.startswith("__"):
        return f"{key}: slime sets this itself"
    if name == "override" and not new_names:
        return f"{key}: a file for --override cannot name another one"
    own = _own_flags().get(name)
    try:
        if own is not None:
            flag, spelled_by_option = own
            value = flag.default if value is None else convert(flag, value)
            setattr(args, flag.name, not value if spelled_by_option and flag.kind == "negative" else value)
            args.explicit |= {flag.name}
            return None
        found = _pass_option(name)
        if found is not None:
            family, short = found
            _set_pass(args, family, short, value)
            return None
    except OutOfRange as error:
        return f"{key} {value}: {error}"
    except ValueError as error:
        return f"{key}: {error}"
    if new_names or name in args.__dict__:
        setattr(args, name, value)
        args.explicit |= {name}
        return None
    reason = why_missing(f"--{name}")
    if reason:
        return f"{key} {reason}"
    near = difflib.get_close_matches(name, [*_own_flags(), *_pass_names()], n=1)
    return f"{key}: no such flag" + (f"; did you mean {near[0]}?" if near else "")


def _own_flags() -> dict[str, tuple[Flag, bool]]:
    return {name: (flag, name != flag.name) for flag in FLAGS.values() for name in names_of_flag(flag)}


def _pass_option(name: str) -> tuple[Family, str] | None:
    for family in FAMILIES:
        prefix = "" if family == "megatron" else f"{family}_"
        if name.startswith(prefix) and name.removeprefix(prefix) in by_name(family):
            return family, name.removeprefix(prefix)
    return None


def _pass_names() -> list[str]:
    return [("" if family == "megatron" else f"{family}_") + name for family in FAMILIES for name in by_name(family)]


def _set_pass(args: Args, family: Family, name: str, value: Any) -> None:
    given: dict[str, Any] = getattr(args, family)
    if value is None:
        given.pop(name, None)
    else:
        given[name] = convert(by_name(family)[name].flag, value)
