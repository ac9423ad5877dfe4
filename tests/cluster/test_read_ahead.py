"""What a training rank does while engines start: colocated on GPUs, rank 0 reads the checkpoint; on
GPUs of its own, each compiles its layers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slime.cluster import train_actor
from slime.cluster.train_actor import TrainActor


@pytest.mark.parametrize(
    ("rank", "gpus", "reads"), [(0, [0], True), (1, [1], False), (0, [], False)]
)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_rank_that_reads_hands_the_model_over(
    monkeypatch: pytest.MonkeyPatch, rank: int, gpus: list[int], reads: bool, backend: str
) -> None:
    made: list[Any] = []
    imported: list[str] = []
    can = SimpleNamespace(
        read_ahead=(lambda args: f"model of {args.train_backend}") if backend == "fsdp" else None
    )
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: gpus)
    monkeypatch.setattr("slime.cluster.train_actor.backend_class", lambda name: can)

    def create(*given: object) -> SimpleNamespace:
        made.append(given)
        return SimpleNamespace(adapter_sync=None, device=SimpleNamespace(type="cpu"))

    monkeypatch.setattr("slime.cluster.train_actor.create_backend", create)
    actor: Any = TrainActor.__new__(TrainActor)
    actor.args = SimpleNamespace(
        train_backend=backend, compile_layers=reads, colocate=True, deterministic=False
    )
    actor.role, actor.rank, actor.world_size = "actor", rank, 2
    actor.preloaded, actor.weight_sync = None, SimpleNamespace(for_adapter=lambda sync: None)
    monkeypatch.setattr(train_actor, "importlib", SimpleNamespace(import_module=imported.append))
    actor.import_backend()
    assert bool(imported) == reads, "the compiler is imported where layers are compiled"
    actor.init("127.0.0.1", 1, None)
    assert made[0][-1] == ("model of fsdp" if reads and backend == "fsdp" else None)
    assert actor.preloaded is None, "it is held once"


@pytest.mark.parametrize(
    ("flags", "device", "passes"),
    [
        ({}, "cuda", ["probe", 1024, 2048]),
        ({"colocate": True}, "cuda", ["probe"]),  # an engine that starts measures the memory
        ({"compile_layers": False}, "cuda", []),
        ({"deterministic": True}, "cuda", ["probe"]),  # a replay does not rehearse
        ({"debug_train_only": True}, "cuda", []),  # a reward model has no log-probs to score
        ({}, "cpu", []),
    ],
)
def test_layers_are_compiled_beside_engines_that_start(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], device: str, passes: list[int | str]
) -> None:
    made: list[int | str] = []
    backend = SimpleNamespace(
        adapter_sync=None,
        device=SimpleNamespace(type=device),
        rehearse=made.append,
        clear_memory=lambda: None,
    )
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [0])
    monkeypatch.setattr("slime.cluster.train_actor.create_backend", lambda *_: backend)
    monkeypatch.setattr(TrainActor, "_score_probe", lambda self: made.append("probe"))
    actor: Any = TrainActor.__new__(TrainActor)
    usual = dict.fromkeys(("colocate", "deterministic", "debug_train_only"), False)
    actor.args = SimpleNamespace(**{"compile_layers": True} | usual | flags)
    actor.role, actor.rank, actor.world_size, actor.preloaded = "actor", 0, 1, None
    actor.weight_sync = SimpleNamespace(for_adapter=lambda sync: None)
    actor.init("127.0.0.1", 1, None)
    assert made == passes
