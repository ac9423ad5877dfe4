"""Whole runs in one process (``--inline``): how their engine is reached. :data:`slime.config.rules` says what
they cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime.config.args import Args

_USERS_HOOKS = (
    "rollout_function_path", "eval_function_path", "custom_generate_function_path", "custom_rm_path",
    "data_source_path",
)  # fmt: skip
"""Functions that may have HTTP clients of their own, with the address of the engine in ``args``."""


def inline_engine(args: Args) -> Literal["no port", "port"] | None:
    """Return whether the engine of this process listens on a port as well, for a function of the user's that may need
    one; everything of slime reaches it without. None: the engine is a process of its own."""
    if not args.inline or args.rollout_backend != "embedded" or args.rollout_external_engine_addrs:
        return None
    paths = [getattr(args, name) for name in _USERS_HOOKS]
    return "port" if any(path and not str(path).startswith("slime.") for path in paths) else "no port"
