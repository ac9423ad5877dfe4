"""The start of the engines of a run, in the rollout manager's process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cluster.actors import ActorHandle, door
from slime.cluster.engine import EngineActor, FleetSettings
from slime.cluster.engine_fleet import EngineFleet
from slime.cluster.health import EngineLoads
from slime.cluster.placement import Placement, thread_environment
from slime.cluster.rollout_workers import RolloutWorkers, parts_of_workers, worker_launcher
from slime.config.machine import raise_file_limit
from slime.config.rollout import may_use_workers
from slime.data.tokenizers import preload_tokenizer
from slime.engines.http import init_http_client, watch_faults
from slime.engines.launch import EngineSettings, EngineSpec, RouterSettings, plan_engines
from slime.observability import progress
from slime.observability.run_dir import RunDir

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.engines.keys import RunKeys


def fleet_of(args: Args, placement: Placement, log_dir: Path, keys: RunKeys) -> EngineFleet:
    """The engines that the flags ask for, before their start; a run that only trains has none."""
    specs = [] if args.debug_train_only else plan_engines(args)
    external = args.rollout_external_engine_addrs or []
    uses_workers = args.rollout_workers > 1 and may_use_workers(args)
    settings = FleetSettings(
        router=RouterSettings.from_args(args, keys),
        tolerant=bool(args.use_fault_tolerance),
        always_routed=bool(args.use_router),
        updated=not args.debug_rollout_only,
        start_seconds=args.start_timeout,
        workers=args.rollout_workers if uses_workers else 0,
        check_interval=args.rollout_health_check_interval,
        check_timeout=args.rollout_health_check_timeout,
        first_wait=args.rollout_health_check_first_wait,
    )
    environment = thread_environment(args.threads_per_process)
    engine = EngineSettings.from_args(args, keys.engine)
    launch = launcher(engine, args.start_timeout, specs, placement, log_dir, environment)
    urls = [url if "://" in url else f"http://{url}" for url in external]
    return EngineFleet(settings, log_dir, launch, specs, urls, keys)


def start_engines(fleet: EngineFleet, args: Args) -> tuple[Args, RolloutWorkers | None]:
    """Start all engines at the same time, then the router and the rollout workers if there are any.

    Returns:
        The arguments with the addresses of the engines, and the workers.
    """
    raise_file_limit()  # The router inherits the limit, because it is a child of this process.
    # The first request would wait for the tokenizer. Not on another thread: imports of transformers
    # on two threads at once can fail.
    meanwhile = partial(preload_tokenizer, args.hf_checkpoint, args.trust_remote_code)
    fleet.start(partial(progress.report, "start engines"), meanwhile)
    args = args.with_values(**fleet.addresses)
    init_http_client(args)
    # Who watches the engines: health checks, which a failed request causes at once, and the record
    # of their load.
    monitor = fleet.monitor
    monitor.start()
    watch_faults(monitor.wake)
    file = RunDir(fleet.log_dir.parent).engines
    fleet.loads = EngineLoads(fleet.engines, lambda: monitor.paused, file)
    fleet.loads.start()
    count = fleet.settings.workers
    if not count:
        return args, None
    parts = parts_of_workers(count, fleet.shares, len(fleet.engines))
    launch = worker_launcher(args, parts, fleet.log_dir, fleet.addresses_of)
    workers = RolloutWorkers(launch, parts, args.start_timeout, monitor.wake)
    workers.start()
    return args, workers


def launcher(
    settings: EngineSettings,
    start_seconds: float,
    specs: Sequence[EngineSpec],
    placement: Placement,
    log_dir: Path,
    environment: dict[str, str],
) -> Callable[[int], list[ActorHandle]]:
    """Return a function that starts the engine with a given index, in one actor per node that it
    spans.
    """

    def launch(index: int) -> list[ActorHandle]:
        spec = specs[index]
        nodes = placement.engine_nodes(spec.slot, spec.num_gpus)
        warms = needs_sampler_warmup(settings, spec)
        common = settings, start_seconds, spec, str(log_dir)
        # The port may be in use on that node. Then this start fails with SGLang's error, and a
        # restart picks another.
        rendezvous = f"{nodes[0][1]}:{random.randint(20000, 29999)}" if len(nodes) > 1 else None
        # With several threads, an actor can report on its server, or kill it, while wait_ready()
        # blocks.
        return [
            door().create(
                EngineActor,
                *(*common, gpus, (rank, len(nodes), rendezvous), warms and rank == 0),
                options=placement.engine_options(slot),
                environment=environment,
                threads=3,
            )
            for rank, (slot, _, gpus) in enumerate(nodes)
        ]

    return launch


def needs_sampler_warmup(settings: EngineSettings, spec: EngineSpec) -> bool:
    """Whether the server must sample with top-p and top-k to count as ready, so that SGLang
    compiles the kernels.

    Every server needs it whose sampling backend has kernels to compile. SGLang's own health check
    asks for a greedy token, greedy is top-k with k = 1 there, and a batch with one such request is
    sampled with the top-k kernel as a whole. Without a warm-up, the first health check of a rollout
    would stop the engine for more than a minute. A server that only prefills or only decodes
    answers no plain request, so it cannot be warmed up; models that are not trained get no
    rollouts.
    """
    from slime.engines.sglang.launch import sampling_backend

    compiles = settings.backend == "sglang" and sampling_backend(settings, spec) != "pytorch"
    return compiles and spec.updates and spec.worker_type == "regular"
