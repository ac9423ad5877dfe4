"""What one training rank decides by itself."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from make_args import make_args

from slime.cluster.train_actor import TrainActor
from slime.engines.keys import NO_KEYS
from slime.observability.progress import Timers
from slime.weights.settings import WeightSyncSettings


class Made:
    def __init__(self, args: Any, colocated_host: bool) -> None:
        self.colocated_host, self.closed = colocated_host, False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("kind", "follows"), [("nccl", True), ("disk", False)])
def test_the_transport_follows_engines_that_come_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, follows: bool
) -> None:
    monkeypatch.setattr("slime.cluster.train_actor.create_transport", Made)
    actor: Any = TrainActor.__new__(TrainActor)
    actor.engine_keys = NO_KEYS
    actor.weight_sync = WeightSyncSettings.from_args(make_args(update_weight_transport=kind))
    actor.transport, actor.same_host = None, True
    actor.choose_transport(True)
    first = actor.transport
    actor.choose_transport(True)
    assert actor.transport is first and first.colocated_host
    actor.choose_transport(False)
    assert first.closed == follows and (actor.transport is not first) == follows
    assert actor.transport.colocated_host is not follows


@pytest.mark.parametrize(
    ("offload", "after_training", "after_an_update"),
    [
        (set(), 0, 0),
        ({"offload_train"}, 1, 0),
        ({"offload_rollout"}, 1, 1),
        ({"offload_train", "offload_rollout"}, 1, 1),
    ],
)
def test_the_allocators_cache_goes_back_whenever_engines_on_the_same_accelerator_take_turns(
    monkeypatch: pytest.MonkeyPatch, offload: set[str], after_training: int, after_an_update: int
) -> None:
    """Also with ``--no-offload-train``: the engines take their memory next, and count on it being
    free.
    """
    cleared: list[bool] = []
    monkeypatch.setattr("slime.backends.train_loop.train_on_rollout", lambda *_: ({}, {}))
    monkeypatch.setattr("slime.data.fields.to_rank_batch", lambda batch: dict(batch))
    monkeypatch.setattr("slime.weights.sync.sync_weights", lambda *_, **__: None)
    monkeypatch.setattr("ray.get", lambda refs, timeout=None: refs)
    actor: Any = TrainActor.__new__(TrainActor)
    actor.engine_keys = NO_KEYS
    actor.timers = Timers()
    flags = {name: name in offload for name in ("offload_train", "offload_rollout")}
    args = make_args(**flags, colocate=True, audit_weights=False)
    actor.args, actor.role, actor.rank, actor.world_size = args, "actor", 0, 1
    actor.early_parts = None
    actor.weight_sync = WeightSyncSettings.from_args(args)
    actor.backend = SimpleNamespace(
        clear_memory=lambda: cleared.append(True),
        named_weights=lambda: iter(()),
        adapter_source=lambda: None,
        using=contextlib.nullcontext,
    )
    actor.profiler, actor.transport = (
        SimpleNamespace(rollout=lambda _: contextlib.nullcontext()),
        None,
    )
    actor.train(0, [{}])
    assert len(cleared) == after_training
    actor.updated_engines = set()
    actor.update_weights([], "0.0", True, {}, "token", "actor", False)
    assert len(cleared) == after_training + after_an_update


def test_a_rank_that_has_no_engines_any_more_leaves_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine joins the group of another sender; in the old one it would wait, and groups are
    limited in number.
    """
    sent: list[bool] = []
    factors = object()

    def sync(*_: object, is_sender: bool, adapter: object, **__: object) -> None:
        sent.append(is_sender)
        assert adapter is factors, "all ranks can leave out the base of an adapter"

    monkeypatch.setattr("slime.cluster.train_actor.create_transport", Made)
    monkeypatch.setattr("slime.weights.transports.on_cuda", lambda: False)
    monkeypatch.setattr("slime.weights.sync.sync_weights", sync)
    actor: Any = TrainActor.__new__(TrainActor)
    actor.engine_keys = NO_KEYS
    actor.timers = Timers()
    actor.args = make_args(update_weight_senders=2, audit_weights=False, phase_timeout=1.0)
    actor.weight_sync = WeightSyncSettings.from_args(actor.args)
    actor.rank, actor.world_size, actor.transport, actor.same_host = 2, 4, None, True
    actor.updated_engines = set()
    actor.backend = SimpleNamespace(
        named_weights=lambda: iter(()), adapter_source=lambda: factors, using=contextlib.nullcontext
    )
    slots = {"http://127.0.0.1:1": range(0, 1), "http://127.0.0.1:2": range(1, 2)}
    actor.update_weights(list(slots), "0.0", False, slots, "token", "actor", False)
    transport = actor.transport
    assert sent == [True] and not transport.closed
    actor.update_weights(["http://127.0.0.1:1"], "0.1", False, slots, "token", "actor", False)
    assert sent == [True, False] and transport.closed
