"""Decode steps as graphs: the same tokens as without, and no graph outlives the tensors it was
recorded with.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from engine_drivers import finish, load, make
from transformers.modeling_outputs import CausalLMOutputWithPast

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
    loaded.engine.runner.graphs = DecodeGraphs(loaded.engine.runner, lambda: recorder)
    for _ in range(2):  # the second time, graphs of the first are used again
        recorded = recorder.recorded
        assert_same(loaded, load(tiny_llama), 1e-4)
    assert recorder.replayed > 20
    assert recorder.recorded <= recorded


@pytest.mark.parametrize("move", ["release", "grow", "forget"])
def test_no_graph_is_used_after_its_tensors_have_moved(tiny_llama: Path, move: str) -> None:
    loaded = load(tiny_llama)
    engine = loaded.engine
    recorders = []

    def recorder() -> Recorder:
        recorders.append(Recorder(loaded))
        return recorders[-1]

    engine.runner.graphs = DecodeGraphs(engine.runner, recorder)
    results(loaded)
    before = recorders[-1]
    if move == "release":
        engine.release(["weights"])
        engine.resume(["weights"])
    elif move == "grow":
        finish(loaded, [make([20] * 300, max_new_tokens=2)])
    else:
        engine.forget_computed()
    results(loaded)
    # CUDA records no more in the memory of graphs that are gone.
    assert recorders[-1] is not before
    assert recorders[-1].recorded > 0 < before.recorded


def test_a_model_that_cannot_be_recorded_is_computed_plainly(tiny_llama: Path) -> None:
    loaded = load(tiny_llama)
    attempts = []

    def refuse(launch: Replay) -> Replay:
        attempts.append(launch)
        raise RuntimeError("operation not permitted when stream is capturing")

    loaded.engine.runner.graphs = DecodeGraphs(loaded.engine.runner, lambda: refuse)
    assert_same(loaded, load(tiny_llama), 1e-4)
    assert len(attempts) == 1


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def on_gpu(model: Path, dtype: str, graphs: bool) -> Loaded:
    """An engine with CUDA graphs, or one that launches the same kernels one by one."""
    loaded = load(model, device="cuda", dtype=dtype)
    runner = loaded.engine.runner
    recorder = partial(cuda_recorder, torch.cuda.Stream(runner.device))
    runner.graphs = DecodeGraphs(runner, recorder if graphs else lambda: lambda launch: launch)
    return loaded


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_graphs_give_the_bits_of_their_kernels(tiny_llama: Path, dtype: str) -> None:
    loaded = on_gpu(tiny_llama, dtype, True)
    other = on_gpu(tiny_llama, dtype, False)
    assert_same(loaded, other, 0)
    for engine in (loaded.engine, other.engine):
        engine.forget_computed()  # the graphs are gone, and others are recorded
    assert_same(loaded, other, 0)
    graphs = loaded.engine.runner.graphs
    assert graphs is not None
    assert graphs.possible


@pytest.mark.cuda
@needs_gpu
def test_a_model_that_waits_for_the_gpu_is_computed_plainly(tiny_llama: Path) -> None:
    loaded = on_gpu(tiny_llama, "float32", True)
    other = on_gpu(tiny_llama, "float32", False)
    graphs = loaded.engine.runner.graphs
    assert graphs is not None

    def wait(model: object, inputs: object, output: CausalLMOutputWithPast) -> None:
        assert output.logits is not None
        output.logits.sum().item()

    waits = loaded.engine.runner.model.register_forward_hook(wait)
    assert_same(loaded, other, 1e-4)
    assert not graphs.possible
    waits.remove()
    assert_same(loaded, other, 1e-4)
