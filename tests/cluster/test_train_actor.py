"""What one training rank decides by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.train_group import TrainActor


class Made:
    def __init__(self, args: Any, colocated_host: bool) -> None:
        self.colocated_host, self.closed = colocated_host, False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("kind", "follows"), [("nccl", True), ("disk", False)])
def test_the_transport_follows_engines_that_come_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, follows: bool
) -> None:
    monkeypatch.setattr("slime.weights.transports.create_transport", Made)
    actor: Any = TrainActor.__new__(TrainActor)
    actor.args, actor.transport, actor.same_host = SimpleNamespace(update_weight_transport=kind), None, True
    actor._choose_transport(True)
    first = actor.transport
    actor._choose_transport(True)
    assert actor.transport is first and first.colocated_host
    actor._choose_transport(False)
    assert first.closed == follows and (actor.transport is not first) == follows
    assert actor.transport.colocated_host is not follows
