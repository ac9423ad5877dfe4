import importlib
from types import SimpleNamespace

import pytest

from slime.cluster.actors import ClusterError, Place
from slime.cluster.placement import (
    ALLOCATOR_SETTINGS,
    PINNING,
    Placement,
    Slots,
    pinning_environment,
    plan_slots,
)
from slime.cluster.stop_signals import StopRequested, StopSignals
from slime.config.rollout import staleness_bound


def make_args(**changes: object) -> SimpleNamespace:
    base = dict(
        actor_num_nodes=1,
        actor_num_gpus_per_node=4,
        rollout_num_gpus=2,
        colocate=False,
    )
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "expected", "total"),
    [
        ({}, Slots(4, 2, 4), 6),
        ({"actor_num_nodes": 2}, Slots(8, 2, 8), 10),
        ({"colocate": True, "rollout_num_gpus": 4}, Slots(4, 4, 0), 4),
        ({"colocate": True, "rollout_num_gpus": 8}, Slots(4, 8, 0), 8),
        ({"colocate": True, "rollout_num_gpus": 6, "critic": 1}, Slots(4, 6, 0, 1), 7),
        ({"starts_engines": False}, Slots(4, 0, 4), 4),
        ({"trains": False}, Slots(0, 2, 0), 2),
        ({"critic": 8}, Slots(4, 2, 4, 8), 14),
    ],
)
def test_slots(changes: dict, expected: Slots, total: int) -> None:
    parts = {"trains": True, "starts_engines": True, "critic": 0}
    gpus = make_args(**{name: value for name, value in changes.items() if name not in parts})
    slots = plan_slots(gpus, **{name: changes.get(name, value) for name, value in parts.items()})
    assert slots == expected
    assert slots.total == total


@pytest.mark.parametrize(("buffer_size", "interval", "bound"), [(1, 1, 1), (4, 2, 5), (2, 1, 2)])
def test_staleness_bound_holds_in_a_simulated_loop(
    buffer_size: int, interval: int, bound: int
) -> None:
    """Generation as early as the buffer allows, always finished before the next weight update."""
    weights_of: dict[int, int] = {}
    version, next_id = 0, 0
    worst = 0
    for step in range(50):
        while next_id < step + buffer_size + (1 if step == 0 else 0) or next_id <= step:
            weights_of[next_id] = version
            next_id += 1
        # next() pops rollout `step`; the freed place is filled at once, still with today's weights
        while next_id <= step + buffer_size:
            weights_of[next_id] = version
            next_id += 1
        worst = max(worst, step - weights_of[step])
        if (step + 1) % interval == 0:
            version = step + 1
    assert staleness_bound(buffer_size, interval) == bound
    assert worst <= bound


def test_ctrl_c_ends_the_wait_for_a_busy_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run has the GPUs: nobody waits five minutes for them after Ctrl-C."""
    waited: list[float] = []
    removed: list[object] = []
    group = SimpleNamespace(wait=lambda timeout_seconds: bool(waited.append(timeout_seconds)))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 8.0})
    # ray.util has a function of this name
    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(module, "remove_placement_group", removed.append)
    stop = StopSignals()

    def check() -> None:
        if len(waited) == 3:
            stop.requested = "SIGINT"
        stop.check()

    with pytest.raises(StopRequested):
        Placement(Slots(4, 4, 0), check)
    assert waited == [1.0, 1.0, 1.0] and removed == [group]


def test_gpus_of_engines_that_span_slots_and_nodes() -> None:
    """8 GPUs on two nodes, bundles in any order, 2 of them train."""
    bundles = {("10.0.0.9", 0): 3, ("10.0.0.9", 1): 5, ("10.0.0.9", 2): 0, ("10.0.0.9", 3): 7}
    bundles |= {("10.0.0.10", gpu): bundle for gpu, bundle in enumerate((6, 1, 4, 2))}
    places = [
        Place(tuple(int(part) for part in address.split(".")), gpu, bundle, address)
        for (address, gpu), bundle in bundles.items()
    ]
    placement = Placement.__new__(Placement)
    placement.slots, placement.places = Slots(2, 6, 2), sorted(places)
    assert placement.engine_nodes(0, 2) == [(0, "10.0.0.9", [2, 3])]
    assert placement.engine_nodes(2, 2) == [(2, "10.0.0.10", [0, 1])]
    assert placement.engine_nodes(0, 4) == [(0, "10.0.0.9", [2, 3]), (2, "10.0.0.10", [0, 1])]
    # Ray shows a single GPU to its actor itself
    assert placement.engine_nodes(5, 1) == [(5, "", None)]
    placement.places = None
    assert placement.engine_nodes(0, 4) == [(0, "", None)]


def test_an_engine_with_unequal_parts_on_its_nodes_is_refused() -> None:
    """A node of 8 GPUs, 2 of which train, and a smaller one: SGLang would count GPUs that its
    process does not see.
    """
    placement = Placement.__new__(Placement)
    sizes = {"10.0.0.1": 8, "10.0.0.2": 2}
    places = [(address, gpu) for address, size in sizes.items() for gpu in range(size)]
    placement.slots = Slots(2, 8, 2)
    placement.places = [
        Place(tuple(map(int, address.split("."))), gpu, i, address)
        for i, (address, gpu) in enumerate(places)
    ]
    with pytest.raises(
        ClusterError, match=r"8 GPUs.*6 GPUs.*10\.0\.0\.1 and 2 GPUs of 10\.0\.0\.2"
    ):
        placement.engine_nodes(0, 8)
    assert [len(gpus or ()) for _, _, gpus in placement.engine_nodes(4, 4)] == [2, 2]


@pytest.mark.parametrize(
    ("own", "driver", "expected"),
    [
        ({}, {}, PINNING),
        (
            {},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            f"expandable_segments:True,{PINNING}",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:1"}, f"a:1,{PINNING}"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "pinned_num_register_threads:2"}, {}, None),
    ],
)
def test_memory_is_pinned_on_several_threads_unless_the_user_says_how(
    own: dict[str, str],
    driver: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in driver.items():
        monkeypatch.setenv(name, value)
    assert pinning_environment(own).get("PYTORCH_CUDA_ALLOC_CONF") == expected
