"""Whole runs in one process (``--inline``): what they need, and what they cannot do."""

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
    """How the engine of an inline run is reached; None if the engine is a process of its own.

    It listens on a port only if a function of the user's may need one. Everything of slime reaches it without.
    """
    if not args.inline or args.rollout_backend == "sglang" or args.rollout_external_engine_addrs:
        return None
    paths = [getattr(args, name) for name in _USERS_HOOKS]
    return "port" if any(path and not str(path).startswith("slime.") for path in paths) else "no port"


def inline_obstacles(args: Args) -> list[str]:
    """Why a run cannot be inline, one line each; empty if it can."""
    own_engine = args.rollout_backend != "sglang" and not args.rollout_external_engine_addrs
    several = "one process holds one training rank and one engine"
    rules = {
        f"--actor-num-gpus-per-node: {several}": args.actor_num_nodes * (args.actor_num_gpus_per_node or 1) > 1,
        f"--rollout-num-gpus: {several}": own_engine and (args.rollout_num_gpus or 1) > 1,
        "--train-backend megatron: its ranks are processes; use --train-backend fsdp": args.train_backend == "megatron",
        "--use-fault-tolerance: it replaces processes, and there is one": args.use_fault_tolerance,
        "--max-restarts: it replaces processes, and there is one": bool(args.max_restarts),
        "--rollout-workers: they are processes": args.rollout_workers > 1,
        "--use-router: there is one engine": own_engine and bool(args.use_router or args.sglang_router_ip),
        "--train-env-vars: set the variables in the environment of this process": bool(args.train_env_vars),
    }
    return [problem for problem, applies in rules.items() if applies]


def check_inline(args: Args) -> list[str]:
    """Problems of ``--inline``."""
    return [f"--inline excludes {obstacle}" for obstacle in inline_obstacles(args)] if args.inline else []
