"""Whole runs in one process (``--inline``): how their engine is reached, and what they cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime.config.args import Args

_USERS_HOOKS = (
    "rollout_function_path", "eval_function_path", "custom_generate_function_path", "custom_rm_path",
    "data_source_path",
)  # fmt: skip
"""Functions that may have HTTP clients of their own, with the address of the engine in ``args``."""


@dataclass(frozen=True)
class Inline:
    """What one process means for a run.

    Attributes:
        engine: Whether the engine of this process listens on a port as well, for a function of the user's that may need
            one; everything of slime reaches it without. None: the engine is a process of its own.
        obstacles: Why the run cannot be inline, one line each.
    """

    engine: Literal["no port", "port"] | None
    obstacles: tuple[str, ...]

    @classmethod
    def from_args(cls, args: Args) -> Inline:
        own_engine = args.rollout_backend == "embedded" and not args.rollout_external_engine_addrs
        paths = [getattr(args, name) for name in _USERS_HOOKS]
        listens = any(path and not str(path).startswith("slime.") for path in paths)
        several = "one process holds one training rank and one engine"
        ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
        rules = {
            f"--actor-num-gpus-per-node: {several}": ranks > 1,
            f"--rollout-num-gpus: {several}": own_engine and (args.rollout_num_gpus or 1) > 1,
            "--train-backend megatron: its ranks are processes; use fsdp": args.train_backend == "megatron",
            "--use-fault-tolerance: it replaces processes, and there is one": args.use_fault_tolerance,
            "--max-restarts: it replaces processes, and there is one": bool(args.max_restarts),
            "--rollout-workers: they are processes": args.rollout_workers > 1,
            "--use-router: there is one engine": own_engine and bool(args.use_router or args.sglang_router_ip),
            "--train-env-vars: set the variables in the environment of this process": bool(args.train_env_vars),
        }
        engine: Literal["no port", "port"] | None = None
        if args.inline and own_engine:
            engine = "port" if listens else "no port"
        return cls(engine, tuple(problem for problem, applies in rules.items() if applies))
