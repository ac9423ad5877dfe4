"""Processes and the accelerators they get. Without a GPU, a "GPU" below means a process slot."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag

MOST = 2**20  # nodes, GPUs or engines: more is a slip of the keyboard


@dataclass
class ClusterConfig:
    _title = "cluster and resources"

    actor_num_nodes: int = flag(1, low=1, high=MOST, help="nodes of the trainer")
    actor_num_gpus_per_node: int = flag(
        None,
        low=1,
        high=MOST,
        help="training GPUs per node; default: what the node has, 1 without a GPU",
    )
    rollout_num_gpus: int = flag(
        None,
        low=0,
        high=MOST,
        help="inference GPUs in all; default: the trainer's with --colocate, else one engine",
    )
    rollout_num_gpus_per_engine: int = flag(1, low=1, high=MOST, help="GPUs of one engine (its tensor parallel size)")
    num_gpus_per_node: int = flag(
        None, low=1, high=MOST, help="width of a node", status="notice", reason="Ray is asked what each node has"
    )
    colocate: bool = flag(False, help="trainer and engines share GPUs and take turns")
    offload: bool = flag(False, help="short for --offload-train --offload-rollout")
    offload_train: bool = flag(
        None,
        kind="toggle",
        help="trainer moves to CPU memory between its phases; default: with --colocate",
    )
    offload_rollout: bool = flag(
        None,
        kind="toggle",
        help="engines release memory while training; default: with --colocate",
    )
    distributed_backend: str = flag(
        None, help="torch.distributed backend", status="notice", reason="it is nccl on CUDA and gloo on the CPU"
    )
    distributed_timeout_minutes: int = flag(10, low=1, help="deadline of one collective")
    threads_per_process: int = flag(
        None,
        low=1,
        help="CPU threads of each trainer and engine process; default: the cores shared out",
    )
    train_env_vars: dict[str, str] = flag({}, help="JSON; environment variables of the training processes")
    use_fault_tolerance: bool = flag(
        False,
        help="go on without engines that die, hang or are cut off, and start them again with the current weights; "
        "off: the run ends with a report",
    )
    max_restarts: int = flag(
        None,
        low=0,
        help="times that the run goes on by itself from its last snapshot when its rollout manager, a training rank, "
        "Ray or the driver has died; default: 3 with --use-fault-tolerance, else 0",
    )
    rollout_health_check_interval: float = flag(
        30.0, above=0, help="seconds between checks that an engine makes tokens"
    )
    rollout_health_check_timeout: float = flag(30.0, above=0, help="seconds an engine has to answer a check")
    rollout_health_check_first_wait: float = flag(0.0, low=0, help="seconds of grace after each pause of the checks")
    use_distributed_post: bool = flag(
        False,
        help="HTTP posts from one actor per node",
        status="notice",
        reason="one client per rollout manager is used",
    )
    http_proxy: str = flag(None, help="proxy", status="notice", reason="it has no reader; engines are reached directly")
