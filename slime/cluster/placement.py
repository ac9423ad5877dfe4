"""Assigns a GPU (or, on a CPU machine, a process slot) to each actor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.cluster.actors import ClusterError, door
from slime.cluster.ray_wait import wait_for
from slime.models.cpu_memory import COMPUTE_VARIABLES

if TYPE_CHECKING:
    from slime.config.cluster import ClusterConfig

PLACEMENT_DEADLINE_SECONDS = 300.0
WAIT_SECONDS = 1.0
# Fractions of a GPU bundle, which must hold an actor, a critic and an engine at most: 2 x 0.4 +
# 0.2.
TRAINER_SHARE = 0.4
ENGINE_SHARE = 0.2
# torch reads the first one that is set
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
# Ray's CPUs are only counted, not assigned: a machine with two cores must hold all actors.
CPU_SLOT = 0.01


@dataclass(frozen=True)
class Slots:
    """Counts and offsets of the bundles in one placement group."""

    train: int
    rollout: int
    rollout_offset: int
    critic: int = 0
    """Bundles that only the critic uses, which follow all others; 0: it shares the trainer's."""

    @property
    def total(self) -> int:
        return max(self.train, self.rollout_offset + self.rollout) + self.critic


def plan_slots(gpus: ClusterConfig, trains: bool, starts_engines: bool, critic: int) -> Slots:
    """In colocated runs, engines and trainer share bundles; otherwise the engines' bundles follow
    the trainer's. A critic with GPUs of its own, ``critic`` in number, comes last.
    """
    train = gpus.actor_num_nodes * (gpus.actor_num_gpus_per_node or 0) if trains else 0
    rollout = (gpus.rollout_num_gpus or 0) if starts_engines else 0
    return Slots(train, rollout, 0 if gpus.colocate else train, critic)


class Placement:
    """The bundles of a run in order of node and GPU.

    Args:
        check: Called about once a second while a busy cluster has no room yet. An exception that it
            raises ends the wait.
    """

    def __init__(self, slots: Slots, check: Callable[[], None] = lambda: None) -> None:
        self.slots = slots
        self.on_gpu = door().resources().get("GPU", 0) > 0
        bundle = {"GPU": 1, "CPU": 1} if self.on_gpu else {"CPU": CPU_SLOT * 3}
        # A bundle without a GPU takes almost no resources, so without it all bundles would go to a
        # single node.
        total = slots.total
        self.group = door().reserve(bundle, max(total, 1), spread=not self.on_gpu)

        def room() -> bool:
            check()
            return self.group.wait(WAIT_SECONDS)

        what = f"room for {total} bundles of {bundle}"
        try:
            wait_for(what, room, PLACEMENT_DEADLINE_SECONDS, poll=0.0, report=door().report)
        except BaseException:
            self.group.remove()
            raise
        # Sorted by node address and GPU, so that neighboring ranks share a node.
        self.places = (
            sorted(self.group.places(total, PLACEMENT_DEADLINE_SECONDS))
            if self.on_gpu and total > 1
            else None
        )

    def threads_per_process(self) -> int:
        """CPU threads of each process: in a synchronous run, trainer and engines take turns, so
        both get all cores.
        """
        most = max(self.slots.train + self.slots.critic, self.slots.rollout, 1)
        return max((os.cpu_count() or 1) // most, 1)

    def options(self, slot: int, share: float) -> Mapping[str, Any]:
        """Where the actor of one slot runs, for :meth:`Actors.create
        <slime.cluster.actors.Actors.create>`.
        """
        bundle = self.places[slot].bundle if self.places else slot
        gpus, cpus = (share, share) if self.on_gpu else (0, CPU_SLOT)
        return self.group.options(bundle, gpus, cpus)

    def train_options(self, rank: int, role: str = "actor") -> Mapping[str, Any]:
        slot = rank
        if role == "critic" and self.slots.critic:
            slot += self.slots.total - self.slots.critic
        return self.options(slot, TRAINER_SHARE)

    def engine_options(self, slot: int) -> Mapping[str, Any]:
        return self.options(self.slots.rollout_offset + slot, ENGINE_SHARE)

    def engine_nodes(self, slot: int, count: int) -> list[tuple[int, str, list[int] | None]]:
        """For each node of an engine with ``count`` slots: its first slot there, the node's
        address, and its GPUs.

        The GPUs are None if the ``CUDA_VISIBLE_DEVICES`` that Ray sets is right: with one GPU, and
        on the CPU.

        Raises:
            ClusterError: The engine would have more GPUs on one node than on another.
        """
        if self.places is None or count == 1:
            return [(slot, "", None)]
        places = self.places[self.slots.rollout_offset + slot :][:count]
        nodes = list(dict.fromkeys(place.node for place in places))
        mine = [[i for i, place in enumerate(places) if place.node == node] for node in nodes]
        if len({len(own) for own in mine}) > 1:
            shares = " and ".join(f"{len(own)} GPUs of {places[own[0]].address}" for own in mine)
            raise ClusterError(
                f"an engine of {count} GPUs would have {shares}, but a server that spans nodes "
                "needs as many on each: change --rollout-num-gpus-per-engine or "
                "--actor-num-gpus-per-node, so that the GPUs that are left on each node hold "
                "whole engines or equal parts of one"
            )
        return [
            (slot + own[0], places[own[0]].address, [places[i].gpu for i in own]) for own in mine
        ]


def thread_environment(threads: int | None) -> dict[str, str]:
    """Environment variables for a process that shares the CPU cores with other processes."""
    count = str(threads or 1)
    own = {name: os.environ.get(name, value) for name, value in COMPUTE_VARIABLES.items()}
    return own | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}


def pinning_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which torch pins memory on several threads: 7 GiB/s beside an
    H200, where one thread pins 2.5.

    Args:
        own: The variables that the process gets from the user. A setting of pinned memory there is
            kept.
    """
    given = [own.get(name) or os.environ.get(name) for name in ALLOCATOR_SETTINGS]
    setting = next(filter(None, given), "")
    if "pinned" in setting:
        return {}
    return {ALLOCATOR_SETTINGS[0]: f"{setting},{PINNING}" if setting else PINNING}
