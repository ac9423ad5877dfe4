"""Megatron's groups on GPUs: a communicator is made for those that are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.megatron


@pytest.fixture
def world() -> Iterator[Any]:
    """The default group of one rank, bound to a device as on a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    group.bound_device_id = torch.device("cuda", 0)
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_no_device_is_bound_while_megatron_creates_its_groups(
    world: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch connects a new group at once if the default group is bound to a device."""
    from slime.config.layout import ParallelLayout
    from slime.plugins.megatron import groups

    seen = []

    def create(**given: Any) -> None:
        seen.append(world.bound_device_id)
        if fails:
            raise RuntimeError("planted")

    monkeypatch.setattr(groups.mpu, "initialize_model_parallel", create)
    monkeypatch.setattr(
        groups.tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed: None
    )
    layout = ParallelLayout(world_size=1)
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            groups.initialize(layout, 0, 1)
    else:
        groups.initialize(layout, 0, 1)
    assert seen == [None]
    assert world.bound_device_id == torch.device("cuda", 0)
