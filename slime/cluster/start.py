"""Start a run: connect to Ray, start engines and training ranks at the same time, restore a
snapshot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoint.manifest import RunFacts
from slime.cluster.actors import ClusterError, Ref, door, use
from slime.cluster.checks import check_schedules
from slime.cluster.engine_calls import offload
from slime.cluster.engine_pool import EnginePool, WeightClock
from slime.cluster.folders import FolderLock, lock_run, lock_save, snapshot_of
from slime.cluster.phases import Run, StepLog
from slime.cluster.placement import Placement, plan_slots
from slime.cluster.ray_wait import ManagerClient, Waiter
from slime.cluster.rollout_manager import RolloutManager
from slime.cluster.snapshots import (
    Snapshots,
    StartingPoint,
    check_save_folder,
    restore_rollouts,
    settings_of,
)
from slime.cluster.stop_signals import REPORTS, StopSignals
from slime.cluster.train_group import TrainGroup
from slime.cluster.trainer import OldActor, Trainer, settle_token_budget
from slime.config.cluster import gpu_problems
from slime.config.layout import ParallelLayout
from slime.config.parser import ConfigError
from slime.config.rollout import has_rewards
from slime.config.settings import role_args
from slime.engines.keys import RunKeys
from slime.observability.display import Display
from slime.observability.metrics import REWARD_KEYS, MetricsLogger, read_metrics
from slime.observability.run_dir import RunDir
from slime.observability.run_state import Settled, append_attempt
from slime.registry import find

if TYPE_CHECKING:
    from slime.cluster.train_actor import Role
    from slime.config.args import Args
    from slime.types import JsonObject

START_MARGIN_SECONDS = 180.0
"""Added to ``--start-timeout`` in the driver. The engine itself waits that long and reports a
failure with the engine's log; the driver must not give up before that report arrives."""


@dataclass
class Parts:
    """What has been started so far, and what the start has settled.

    :func:`start` fills this in part by part. So after a failure at any point, the shutdown ends
    exactly what exists.

    Attributes:
        args: The arguments; the start replaces those values that are known only later.
        asynchronous: Whether rollouts are generated while an earlier one trains.
        locks: Of the folders to which only this run may write.
        keys: The keys of engines and routers.
        waiter: Waits for calls of all actors.
        starting: The engines that are being started: a reference to their URLs.
        urls: The URLs of the engines once all of them have answered.
        run: None until the start is complete, and while training ranks are replaced.
        unattended: Whether nobody asked for this part of the run, which a loss has caused.
        settings: What manifests say of the arguments, see :func:`settings_of`; empty until the
            start is complete.
    """

    args: Args
    dir: RunDir
    begin: StartingPoint
    log: StepLog
    stop: StopSignals
    asynchronous: bool = False
    locks: list[FolderLock] = field(default_factory=list)
    keys: RunKeys = field(default_factory=RunKeys)
    waiter: Waiter = field(init=False)
    placement: Placement | None = None
    manager: ManagerClient | None = None
    starting: Ref[list[str]] | None = None
    urls: list[str] = field(default_factory=list)
    groups: list[TrainGroup] = field(default_factory=list)
    run: Run | None = None
    unattended: bool = field(default_factory=lambda: bool(REPORTS.settings))
    settings: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiter = Waiter(
            self.stop,
            self.log.show_status,
            self.args.status_timeout or None,
            self.log.display.state,
        )

    def await_engines(self, manager: ManagerClient, release: bool) -> None:
        """Wait until the engines that are being started answer, if there are any; with ``release``,
        they then release their memory.
        """
        if self.starting is None:
            return
        self.urls = manager.wait(
            self.starting,
            "the engines to start",
            self.args.start_timeout + START_MARGIN_SECONDS,
            flag="--start-timeout",
        )
        self.starting = None
        if release and self.urls:
            manager.call("the engines to release memory", RolloutManager.on_engines, offload)


def prepare(args: Args, asynchronous: bool = False, in_program: bool = False) -> Parts:
    """Set up what needs no other process: the snapshot to resume from, the run's folder, and the
    display.

    Args:
        asynchronous: Whether rollouts are generated while an earlier one trains
            (``train_async.py``).
        in_program: Whether the run belongs to a program of the user's, see :class:`StopSignals`.

    Raises:
        FolderInUse: Another run writes to the folder of this one, or to ``--save``.
    """
    begin = StartingPoint.of(args, args.start_rollout_id)
    locks = [lock_run(RunDir.parent_of_runs(args.output_dir), args.run_name)]
    try:
        folder = RunDir.create(args, resume=begin.resumes)
        locks += [lock_save(args.save)] if args.save else []
    except Exception:
        locks[0].release()
        raise
    # The time of a program before its run does not count as the run's.
    log = StepLog(
        Display(folder, since=time.time() if in_program else None),
        () if has_rewards(args, args.rollout_function_path) else REWARD_KEYS,
    )
    keys = RunKeys.of(args.sglang, args.router, bool(args.rollout_external_engine_addrs))
    return Parts(args, folder, begin, log, StopSignals(in_program), asynchronous, locks, keys)


def start(parts: Parts) -> Run:
    """Start all parts of the run; each is stored in ``parts`` as soon as it exists.

    Engines and training ranks load their models at the same time, unless both use the same GPU. An
    engine takes its share of the GPU memory that is free when it starts, so in that case the ranks
    only import their libraries, and load their models when the engines have started and released
    their memory again.
    """
    args = parts.args
    with parts.log.phase("start"):
        # The cluster, and where in it each process of the run has its place.
        use(find("actors", "inline")() if args.inline else None)
        door().connect()
        parts.stop.install()  # again: Ray's C++ code has installed handlers of its own
        have = int(door().resources().get("GPU", 0))
        if have and (problems := gpu_problems(args, have)):
            raise ClusterError(problems[0])
        own_engines = not (args.debug_train_only or args.rollout_external_engine_addrs)
        slots = plan_slots(args, not args.debug_rollout_only, own_engines, args.critic_gpus)
        placement = parts.placement = Placement(slots, parts.stop.check)
        threads = args.threads_per_process or placement.threads_per_process()
        parts.args = args = args.with_values(threads_per_process=threads)

        # The rollout manager, which starts the engines. Without --num-rollout, only its data source
        # knows the length of the run (--num-epoch). The training ranks need it when they are built,
        # for the learning-rate schedule.
        manager = parts.manager = _start_manager(parts, placement)
        if not args.debug_train_only:
            parts.starting = manager.start(RolloutManager.start_engines)
        if args.num_rollout is None:
            count = manager.call("the data source", RolloutManager.num_rollout)
            parts.args = args = args.with_values(num_rollout=count)

        # The training ranks. Where they share GPUs with the engines, these come first.
        if slots.train:
            start_training(parts, placement)
        release = bool(args.offload_rollout and slots.train)
        if args.offload_rollout and placement.on_gpu:
            parts.await_engines(manager, release)
        for group in parts.groups:
            group.load()
        if args.save:
            check_save_folder(Path(args.save), manager, parts.groups)
        parts.await_engines(manager, release)
        for group in parts.groups:
            group.wait_started()
        trainer = trainer_of(parts)

        # After the models are loaded, since it measures memory; before the settings of the
        # snapshots are taken from ``args``, since a resumed run keeps the budget of its snapshot.
        settle_token_budget(parts, placement, trainer, manager)
        parts.settings = settings_of(vars(parts.args))
        restore_rollouts(parts, manager)
        metrics = open_records(parts, placement)
    return begin_run(parts, manager, trainer, parts.urls, metrics)


def trainer_of(parts: Parts) -> Trainer:
    args = parts.args
    groups = {group.role: group for group in parts.groups}
    return Trainer(
        groups.get("actor"),
        groups.get("critic"),
        OldActor.from_args(args, parts.asynchronous, parts.begin.manifest),
        parts.log,
        parts.stop,
        cluster=args,
        kl=args,
        num_critic_only_steps=args.num_critic_only_steps,
        trained=parts.begin.trained,
    )


def begin_run(
    parts: Parts, manager: ManagerClient, trainer: Trainer, urls: list[str], metrics: MetricsLogger
) -> Run:
    args = parts.args
    begin = parts.begin
    log = parts.log
    pool = EnginePool(
        manager,
        trainer,
        log,
        urls,
        WeightClock(begin.attempt, begin.first_rollout),
        cluster=args,
        sync=args,
    )
    facts = RunFacts(
        attempt=begin.attempt,
        world_size=len(trainer.actor.ranks) if trainer.actor is not None else 0,
        seed=args.seed,
        settings=parts.settings,
    )
    snapshots = Snapshots(args, facts, manager, trainer, pool, log, parts.stop, begin.trained)
    num_rollout = int(args.num_rollout or 0)
    parts.run = Run(
        args, begin.first_rollout, num_rollout, manager, trainer, pool, snapshots, log, parts.stop
    )
    log.begin_steps(metrics)
    return parts.run


def _start_manager(parts: Parts, placement: Placement) -> ManagerClient:
    args = parts.args
    layouts = [ParallelLayout.from_args(args) if placement.slots.train else ParallelLayout()]
    if placement.slots.critic:
        critic = ParallelLayout.from_args(role_args(args, "critic"))
        layouts += [critic] if critic != layouts[0] else []
    return ManagerClient(
        door().create(
            RolloutManager,
            args,
            parts.dir.path,
            layouts,
            placement,
            parts.keys,
            parts.stop.in_program,
            threads=8,  # status() and on_engines() can answer while generate() runs
        ),
        parts.waiter,
        args.phase_timeout,
    )


def start_training(parts: Parts, placement: Placement) -> None:
    """Start the ranks of actor and critic, which import their libraries in the background."""
    # checked again: the length of the run may have been unknown until now
    if problems := check_schedules(parts.args):
        raise ConfigError(problems)
    roles: list[Role] = ["actor", "critic"] if parts.args.use_critic else ["actor"]
    snapshot = parts.begin.snapshot
    for role in roles:
        args = parts.args
        load = snapshot.path / role if snapshot is not None else None
        if (
            role == "critic"
            and not parts.begin.resumes
            and (other := snapshot_of(args.critic_load))
        ):
            # only the weights of another run's critic
            load = other.path / role
            args = args.with_values(finetune=True, no_load_optim=True, no_load_rng=True)
        parts.groups.append(
            TrainGroup(args, role, placement, parts.waiter, parts.dir.logs, load, parts.keys.engine)
        )


def open_records(parts: Parts, placement: Placement) -> MetricsLogger:
    """Write the values that the start has settled to the folder of the run, and open the metrics
    log.
    """
    args = parts.args
    begin = parts.begin
    append_attempt(
        parts.dir,
        Settled(
            asynchronous=parts.asynchronous,
            on_gpu=placement.on_gpu,
            num_rollout=int(args.num_rollout or 0),
            threads=int(args.threads_per_process or 1),
            max_tokens=args.max_tokens_per_gpu,
            forward_tokens=args.log_probs_max_tokens_per_gpu,
            first_rollout=begin.first_rollout,
            loaded=None if begin.snapshot is None else str(begin.snapshot.path.absolute()),
            working_directory=str(Path.cwd()),
        ),
    )
    return open_metrics(parts)


def open_metrics(parts: Parts) -> MetricsLogger:
    """Open the metrics log; a resumed run drops the rows of the steps that it trains again.

    If the previous process was killed after it wrote the snapshot but before it logged that step,
    the step's row is missing. It is added from the metrics in the snapshot's manifest.
    """
    begin = parts.begin
    logger = MetricsLogger(
        parts.args, parts.dir, begin.first_rollout if begin.resumes else None, parts.unattended
    )
    step = "rollout/step"
    file = parts.dir.metrics
    if begin.manifest is not None and begin.trained is not None and file.exists():
        logged = [row.get(step) for row in read_metrics(file)]
        if begin.trained not in logged:
            logger.log(begin.manifest["metrics"], begin.trained, step)
    return logger
