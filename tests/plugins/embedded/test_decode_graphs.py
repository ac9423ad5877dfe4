"""Decode steps as graphs: the same tokens as without, and no graph outlives the tensors it was
recorded with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_drivers import finish, load, make, step

from slime.plugins.embedded.graphs import DecodeGraphs, Replay, cuda_recorder
from slime.plugins.embedded.loading import Loaded
from slime.plugins.embedded.sequence import Sequence


class Recorder:
    """Records as CUDA does: what is launched again finds its tensors at the same addresses only."""

    def __init__(self, loaded: Loaded) -> None:
        self.runner = loaded.engine.runner
        self.recorded = 0
        self.replayed = 0

    def addresses(self) -> list[int]:
        stored = [tensor for store in self.runner.cache.stores for tensor in store.values()]
        return [tensor.data_ptr() for tensor in [*stored, *self.runner.model.parameters()]]

    def __call__(self, launch: Replay) -> Replay:
        addresses = self.addresses()
        self.recorded += 1

        def replay() -> None:
            assert self.addresses() == addresses
            self.replayed += 1
            launch()

        return replay


def sequences() -> list[Sequence]:
    """Sequences that come together and end one after the other, some longer than a length step."""
    return [
        make(range(20 + i, 34 + 3 * i), f"r{i}", seed=i, temperature=0.0, max_new_tokens=6 + 9 * i)
        for i in range(6)
    ]


def results(loaded: Loaded) -> list[tuple[list[int], list[float]]]:
    batch = sequences()
    finish(loaded, batch)
    return [(sequence.output_ids, sequence.output_logprobs) for sequence in batch]


def assert_same(one: Loaded, other: Loaded, tolerance: float) -> None:
    for (tokens, logprobs), (expected, reference) in zip(results(one), results(other), strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(reference, abs=tolerance)


def test_graphs_give_the_tokens_of_plain_steps(tiny_llama: Path) -> None:
    loaded = load(tiny_llama)
    recorder = Recorder(loaded)
    loaded.engine.runner.graphs = DecodeGraphs(loaded.engine.runner, recorder)
    for _ in range(2):  # the second time, graphs of the first are used again
        recorded = recorder.recorded
        assert_same(loaded, load(tiny_llama), 1e-4)
    assert recorder.replayed > 20
    assert recorder.recorded <= recorded


@pytest.mark.parametrize("move", ["release", "grow", "forget"])
def test_no_graph_is_used_after_its_tensors_have_moved(tiny_llama: Path, move: str) -> None:
    loaded = load(tiny_llama)
    engine = loaded.engine
    recorder = Recorder(loaded)
    engine.runner.graphs = DecodeGraphs(engine.runner, recorder)
    results(loaded)
    before = recorder.recorded
    if move == "release":
        engine.release(["weights"])
        engine.resume(["weights"])
    elif move == "grow":
        finish(loaded, [make([20] * 300, max_new_tokens=2)])
    else:
        engine.forget_computed()
    results(loaded)
    assert recorder.recorded > before > 0


def test_a_model_that_cannot_be_recorded_is_computed_plainly(tiny_llama: Path) -> None:
    loaded = load(tiny_llama)
    attempts = []

    def refuse(launch: Replay) -> Replay:
        attempts.append(launch)
        raise RuntimeError("operation not permitted when stream is capturing")

    loaded.engine.runner.graphs = DecodeGraphs(loaded.engine.runner, refuse)
    assert_same(loaded, load(tiny_llama), 1e-4)
    assert len(attempts) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("broken", [False, pytest.param(True, id="waits for the GPU")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(tiny_llama: Path, broken: bool, dtype: str) -> None:
    loaded = load(tiny_llama, device="cuda", dtype=dtype)
    runner = loaded.engine.runner
    if broken:
        runner.model.model.norm.register_forward_hook(lambda *seen: print(seen[2].sum().item()))
    runner.graphs = DecodeGraphs(runner, cuda_recorder(runner.device))
    plain = load(tiny_llama, device="cuda", dtype=dtype)
    plain.engine.runner.graphs = None
    assert_same(loaded, plain, 1e-4 if dtype == "float32" else 0.05)
    assert runner.graphs.possible is not broken
    assert step(loaded) is None
