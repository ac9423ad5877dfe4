"""Flags of processes and their GPUs. On a machine without GPUs, a "GPU" in this file means a
process slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.config.engine import (
    MOST,
    asked_gpus,
    engines_beside_trainer,
    readable_models,
    shared_groups,
    total_gpus,
)
from slime.config.flag import Section, flag
from slime.config.machine import Machine, connection_limit

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.rules import Run


@dataclass
class ClusterConfig(Section):
    _title = "cluster and resources"

    actor_num_nodes: int = flag(1, low=1, high=MOST)
    """Number of nodes for training"""
    actor_num_gpus_per_node: int = flag(low=1, high=MOST)
    """Training GPUs per node; without GPUs, training processes. Default: all GPUs of the node
    (fewer if engines need their own), or 1 without GPUs"""
    critic_num_nodes: int | None = flag(low=1, high=MOST)
    """Number of nodes for a critic with GPUs of its own, which trains beside the actor. Default: 1
    with --critic-num-gpus-per-node, otherwise the critic takes turns on the actor's GPUs"""
    critic_num_gpus_per_node: int | None = flag(low=1, high=MOST)
    """The critic's own GPUs per node; without GPUs, processes. Default: as many as the actor with
    --critic-num-nodes, otherwise none"""
    rollout_num_gpus: int = flag(low=0, high=MOST)
    """GPUs for inference, in total; without GPUs, engine processes. Default: the training GPUs with
    --colocate, otherwise the GPUs of one engine"""
    rollout_num_gpus_per_engine: int = flag(1, low=1, high=MOST)
    """GPUs per engine, which is its tensor parallel size"""
    colocate: bool = False
    """Let the trainer and the engines share the same GPUs and take turns"""
    offload: bool = False
    """Shorthand for --offload-train --offload-rollout"""
    offload_train: bool = flag()
    """Move the trainer to CPU memory while it is idle. Default: on with --colocate"""
    offload_rollout: bool = flag()
    """Release the engines' GPU memory during training. Default: on with --colocate"""
    distributed_timeout_minutes: int = flag(10, low=1)
    """Deadline in minutes for a collective of torch.distributed"""
    threads_per_process: int | None = flag(low=1)
    """CPU threads of each trainer and engine process. Default: an equal share of the cores"""
    train_env_vars: dict[str, str | float] = flag({})
    """Environment variables of the training processes, as a JSON object"""
    inline: bool = flag(False, kind="toggle")
    """Run everything in one process on one device, without Ray, for debugging; the numbers are the
    same. One training rank and one engine"""
    use_fault_tolerance: bool = False
    """Continue without engines that die, hang or cannot be reached, and restart them. Without this
    flag the run ends with a report"""
    max_restarts: int = flag(low=0)
    """Automatic restarts from the last snapshot after the rollout manager, a training rank, Ray or
    the driver has died. Default: 3 with --use-fault-tolerance, otherwise 0"""
    rollout_health_check_interval: float = flag(30.0, above=0)
    """Seconds between two health checks of an engine, each of which generates tokens"""
    rollout_health_check_timeout: float = flag(30.0, above=0)
    """Deadline in seconds for the answer to a health check"""
    rollout_health_check_first_wait: float = flag(0.0, low=0)
    """Seconds to wait before the first health check after each pause of the checks"""

    @property
    def num_servers(self) -> int:
        """The number of engines that fit on the GPUs for inference."""
        return (self.rollout_num_gpus or 0) // max(self.rollout_num_gpus_per_engine, 1)


def derive_resources(run: Run) -> None:
    args = run.args
    machine = run.machine
    # Nothing has to make room.
    if args.debug_rollout_only:  # there is no trainer to share the GPUs with
        args.colocate = args.offload = args.offload_train = args.offload_rollout = False
    if args.critic_num_nodes or args.critic_num_gpus_per_node:
        args.fill(critic_num_nodes=1, critic_num_gpus_per_node=args.actor_num_gpus_per_node or 1)
    # What the user has placed stays as it is.
    if args.actor_num_gpus_per_node is None:
        gpus = max(machine.gpus - args.critic_gpus, 1) if machine.cuda else 1
        alone = (
            not machine.cuda
            or args.debug_train_only
            or args.debug_rollout_only
            or bool(args.rollout_external_engine_addrs)
        )
        args.notices += _default_placement(args, gpus, alone, run.asynchronous)
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.sglang_config and (models := readable_models(args)):
        args.fill(rollout_num_gpus=total_gpus(models))
    args.fill(
        max_restarts=3 if args.use_fault_tolerance else 0,
        rollout_num_gpus=args.world_size if args.colocate else args.rollout_num_gpus_per_engine,
    )


def derive_critic(cluster: ClusterConfig, shares: bool) -> list[str]:
    """Let the actor and a critic that ``shares`` its GPUs make room for each other, and return
    what is told.
    """
    if not (shares and cluster.colocate) or cluster.offload_train:
        return []
    cluster.offload_train = True
    return ["--no-offload-train has no effect: actor and critic take turns on the engines' GPUs"]


def _default_placement(
    cluster: ClusterConfig, gpus: int, alone: bool, asynchronous: bool
) -> list[str]:
    """Place trainer and engines on ``gpus``, and return what is told: let them share these, or split
    them in train_async.py, where they run at the same time; with only one of the two
    (``alone``), it has all.
    """
    told: list[str] = []
    if alone or cluster.colocate:
        pass
    elif cluster.rollout_num_gpus is not None:
        gpus = max(gpus - cluster.rollout_num_gpus, 1)
    # Generation and training alternate in train.py, so each may have all GPUs in its turn.
    elif not asynchronous:
        cluster.colocate = True
        told = [
            f"no placement is given, so trainer and engines share {gpus} GPU(s), as with --colocate"
        ]
    # They run at the same time in train_async.py, so each gets a half; engines get the larger one.
    elif gpus > 1:
        cluster.rollout_num_gpus = gpus - gpus // 2
        gpus //= 2
        told = [
            f"{gpus} GPUs are used for training and {cluster.rollout_num_gpus} for generation "
            "(--actor-num-gpus-per-node, --rollout-num-gpus)"
        ]
    cluster.actor_num_gpus_per_node = gpus
    return told


def environment_texts(variables: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of ``--train-env-vars`` as texts; JSON and YAML also have numbers."""
    return {name: str(value) for name, value in variables.items()}


def check_machine(run: Run) -> list[str]:
    """Check the rules that depend on this machine. The GPUs of a Ray cluster are checked later,
    when the run connects to it."""
    args = run.args
    machine = run.machine
    if machine.in_cluster:
        return []
    engines = len(args.rollout_external_engine_addrs or []) or args.num_servers
    # More requests than sockets would fail one by one in the middle of a rollout.
    asked = (args.sglang_server_concurrency or 0) * engines
    most = connection_limit(args.sglang_router_ip)
    if asked > most:
        args.notices.append(
            f"--sglang-server-concurrency {args.sglang_server_concurrency} with {engines} engines "
            f"means {asked} concurrent requests; they are limited to {most}, because a request "
            "takes two open files (ulimit -Hn) and, with a router on another machine, a local "
            "port (ip_local_port_range)"
        )
    return gpu_problems(args, machine.gpus) if machine.cuda else _too_many_slots(args, machine)


def gpu_problems(args: Args, there: int) -> list[str]:
    """Check that colocated servers have the GPUs of training ranks, and that the run needs no more
    GPUs than this machine, or its cluster, has.
    """
    problems = engines_beside_trainer(args, shared_groups(args))
    train = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = args.rollout_num_gpus
    if args.debug_train_only or args.rollout_external_engine_addrs:
        rollout = 0
    needed = (max(train, rollout) if args.colocate else train + rollout) + args.critic_gpus
    if needed <= there:
        return problems
    share = "" if args.colocate else "--colocate to share GPUs, "
    return [
        *problems,
        f"the run needs {needed} GPUs ({asked_gpus(args)}, "
        f"{'shared' if args.colocate else 'not shared'}), but this machine (or cluster) has {there}: "
        f"use {share}smaller numbers, or a larger Ray cluster (ray start, then ray job submit or "
        "RAY_ADDRESS)",
    ]


def _too_many_slots(args: Args, machine: Machine) -> list[str]:
    """Check that a machine without GPUs runs at most one process of each kind per core; more would
    only slow down each other."""
    asked = {
        "--actor-num-gpus-per-node": args.actor_num_nodes * args.actor_num_gpus_per_node
        if "actor_num_gpus_per_node" in args.explicit
        else 0,
        "--rollout-num-gpus": args.rollout_num_gpus if "rollout_num_gpus" in args.explicit else 0,
    }
    if critic := args.critic_gpus:
        asked["--critic-num-gpus-per-node"] = critic
    if args.debug_rollout_only:
        del asked["--actor-num-gpus-per-node"]
    if args.debug_train_only:
        del asked["--rollout-num-gpus"]
    if all(count <= machine.cores for count in asked.values()):
        return []
    change = " ".join(f"{option} 1" for option in asked)
    return [
        f"{asked_gpus(args)}: this machine has no GPU and {machine.cores} CPU cores, so at most "
        f"{machine.cores} processes of each kind can run: use {change} (or set these in an "
        "--override file), or a Ray cluster"
    ]


_USERS_HOOKS = (
    "rollout_function_path", "eval_function_path", "custom_generate_function_path", "custom_rm_path",
    "data_source_path",
)  # fmt: skip
"""Functions that may have HTTP clients of their own, with the address of the engine in ``args``."""


def inline_engine(args: Args) -> Literal["no port", "port"] | None:
    """Return whether the engine of this process listens on a port as well, for a function of the
    user's that may need one; everything of slime reaches it without. None: the engine is a process
    of its own."""
    if not args.inline or args.rollout_backend != "embedded" or args.rollout_external_engine_addrs:
        return None
    # A function of slime reaches the engine by calls of this process.
    for path in (getattr(args, name) for name in _USERS_HOOKS):
        if path and not str(path).startswith("slime."):
            return "port"
    return "no port"
