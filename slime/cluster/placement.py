"""Which GPU (or, on a CPU machine, which process slot) each actor gets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.cluster.session import ClusterError, check_resources, cluster_report

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from slime.config.args import Args

PLACEMENT_DEADLINE_SECONDS = 300.0
TRAINER_SHARE = 0.4  # of a bundle; the critic takes as much again
ENGINE_SHARE = 0.2
CPU_SLOT = 0.01  # Ray's CPUs are logical: two cores must never leave a placement group pending


@dataclass(frozen=True)
class Slots:
    """Counts and offsets of the bundles in one placement group."""

    train: int
    rollout: int
    rollout_offset: int

    @property
    def total(self) -> int:
        return max(self.train, self.rollout_offset + self.rollout)


def plan_slots(args: Args) -> Slots:
    """Colocated runs share bundles; otherwise engines come after the trainers in the order of nodes and GPUs."""
    train = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    external = bool(args.rollout_external_engine_addrs)
    rollout = 0 if args.debug_train_only or external else int(args.rollout_num_gpus or 0)
    return Slots(train, rollout, 0 if args.colocate else train)


class Placement:
    """A placement group with its bundles in order of node and GPU."""

    def __init__(self, args: Args) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self.slots = plan_slots(args)
        self.on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        check_resources(args, self.slots.total if self.on_gpu else 0)
        bundle = {"GPU": 1, "CPU": 1} if self.on_gpu else {"CPU": CPU_SLOT * 3}
        # A bundle without a GPU takes next to nothing, so packed all would go to one of several nodes.
        strategy = "PACK" if self.on_gpu else "SPREAD"
        self.group = placement_group([bundle] * max(self.slots.total, 1), strategy=strategy)
        if not self.group.wait(timeout_seconds=PLACEMENT_DEADLINE_SECONDS):
            raise ClusterError(
                f"no room for {self.slots.total} bundles of {bundle} within {PLACEMENT_DEADLINE_SECONDS:.0f} s; "
                f"{cluster_report()}"
            )
        self.places = _sorted_places(self.group, self.slots.total) if self.on_gpu and self.slots.total > 1 else None

    def threads_per_process(self) -> int:
        """CPU threads of each process: trainers and engines of a synchronous run take turns, so both get all cores."""
        return max((os.cpu_count() or 1) // max(self.slots.train, self.slots.rollout, 1), 1)

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Ray actor options for one slot."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = self.places[slot].bundle if self.places else slot
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=index)
        if self.on_gpu:
            return {"num_gpus": share, "num_cpus": share, "scheduling_strategy": strategy}
        return {"num_gpus": 0, "num_cpus": CPU_SLOT, "scheduling_strategy": strategy}

    def train_options(self, rank: int) -> dict[str, Any]:
        return self.options(rank, TRAINER_SHARE)

    def engine_options(self, slot: int) -> dict[str, Any]:
        return self.options(self.slots.rollout_offset + slot, ENGINE_SHARE)

    def engine_nodes(self, slot: int, count: int) -> list[tuple[int, str, list[int] | None]]:
        """The nodes of an engine of ``count`` slots: its first slot there, the address, and its GPUs.

        The GPUs are None where Ray's own ``CUDA_VISIBLE_DEVICES`` says it: for one GPU, and on the CPU.
        """
        if self.places is None or count == 1:
            return [(slot, "", None)]
        places = self.places[self.slots.rollout_offset + slot :][:count]
        nodes = list(dict.fromkeys(place.node for place in places))
        mine = [[i for i, place in enumerate(places) if place.node == node] for node in nodes]
        return [(slot + own[0], places[own[0]].address, [places[i].gpu for i in own]) for own in mine]

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def thread_environment(threads: int | None) -> dict[str, str]:
    """Environment variables of a process that computes on the CPU; threads of several processes share the cores."""
    count = str(threads or 1)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # Threads that spin while they wait take the cores from the processes that compute.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "2000",  # A short spin: without it small operations are a third slower.
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass(frozen=True, order=True)
class Place:
    """One GPU bundle; sorted by node, then GPU."""

    node: tuple[int, ...]
    gpu: int
    bundle: int
    address: str


def _sorted_places(group: PlacementGroup, count: int) -> list[Place]:
    """Bundles by (node address, GPU id), so that neighbouring ranks share a node."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_gpus=1, num_cpus=1)
    def where() -> tuple[str, int]:
        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])

    refs = [
        where.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i)
        ).remote()
        for i in range(count)
    ]
    places = []
    for bundle, (address, gpu) in enumerate(ray.get(refs, timeout=PLACEMENT_DEADLINE_SECONDS)):
        node = tuple(int(part) for part in address.split(".")) if address.count(".") == 3 else (0,)
        places.append(Place(node, gpu, bundle, address))
    return sorted(places)
