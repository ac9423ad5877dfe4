"""Decode steps as CUDA graphs.

A decode step launches some 1,500 kernels, and launching them from Python takes a GPU of today
longer than computing them, if the model is small. A graph launches all of them at once. It is
recorded for fixed shapes and addresses, so rows and attention lengths are rounded up, and its
inputs and its logits have tensors of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from slime.plugins.embedded.attention import RowGroup, StepContext
from slime.plugins.embedded.sampling import on_device

if TYPE_CHECKING:
    from slime.plugins.embedded.runner import Rows, Runner

logger = logging.getLogger(__name__)

FEWEST_ROWS = 8
LENGTH_STEP = 64


Replay = Callable[[], object]
Recorder = Callable[[Replay], Replay]
"""Records what a function launches, and returns what launches it again."""


def cuda_recorder(stream: torch.cuda.Stream) -> Recorder:
    """Return what records graphs on a stream of their own. They share memory, and when all of them
    are gone, no more can be recorded in it.

    Raises:
        RuntimeError: (when it records) A function waits for the GPU, or memory is full.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(launch: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            # Other threads of a run in one process may use the GPU meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        return graph.replay

    return record


class DecodeGraphs:
    """The graphs of one engine, by rows and attention length.

    A graph is recorded when its shape is needed for the second time: the first step computes with
    the same tensors, which lets libraries choose and load their kernels. A model that decides
    something on the host cannot be recorded; all its steps are computed without a graph.

    Args:
        recorder: Returns a new recorder; see :func:`cuda_recorder`.
    """

    def __init__(self, runner: Runner, recorder: Callable[[], Recorder]) -> None:
        self.runner = runner
        self.recorder = recorder
        self.possible = not runner.position_axes and runner.kernels is None
        self.drop()

    def drop(self) -> None:
        """Forget all graphs, because tensors of the model or of the cache have moved."""
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._replays: dict[tuple[int, int], Replay] = {}
        self._logits: torch.Tensor | None = None  # [slots, vocab], of all graphs
        self._record = self.recorder()
        self._generation = self.runner.cache.generation

    @torch.inference_mode()
    def forward(self, rows: Rows) -> torch.Tensor | None:
        """Return the logits ``[rows, vocab]`` of one token of each sequence, or None if this step
        must be computed without a graph.

        The tensor is overwritten by the next step.
        """
        cache = self.runner.cache
        count = len(rows)
        if not self.possible or rows.adapters or rows.slots != list(range(count)):
            return None
        if self._generation != cache.generation:
            self.drop()
        # Rows that are added write to the bin, and nobody reads what they compute.
        size = min(max(FEWEST_ROWS, 1 << (count - 1).bit_length()), cache.num_slots)
        missing = size - count
        shape = (size, min(rounded_length(max(rows.positions) + 1), cache.capacity))
        host = torch.tensor(
            [
                rows.tokens + [0] * missing,
                rows.positions + [0] * missing,
                rows.slots + [cache.bin_slot] * missing,
            ]
        )
        self.runner.adapters.select((), self.runner.device)
        if shape not in self._inputs:
            self._inputs[shape] = on_device(host, self.runner.device)
            self._compute(shape)
        else:
            self._inputs[shape].copy_(on_device(host, self.runner.device))
            if shape not in self._replays:
                try:
                    self._replays[shape] = self._record(partial(self._compute, shape))
                except RuntimeError as error:
                    logger.info("decode steps of this model are no CUDA graphs: %s", error)
                    self.drop()
                    self.possible = False
                    return None
            self._replays[shape]()
        assert self._logits is not None
        return self._logits[:count]

    def _compute(self, shape: tuple[int, int]) -> None:
        """Compute the logits of the rows in the inputs of a shape."""
        size, length = shape
        tokens, positions, slots = self._inputs[shape]
        cache = self.runner.cache
        step = StepContext(
            cache,
            write_index=slots * cache.capacity + positions,
            lengths=positions + 1,
            groups=[RowGroup(0, size, 0, False, length)],
        )
        logits = self.runner.compute(
            step, input_ids=tokens[None], position_ids=positions[None], logits_to_keep=0
        )
        if self._logits is None:
            self._logits = logits.new_empty(cache.num_slots, logits.shape[1])
        self._logits[:size].copy_(logits)


def rounded_length(length: int) -> int:
    """Return the attention length of a graph: a quarter more at most, or :data:`LENGTH_STEP`."""
    step = max(LENGTH_STEP, (1 << length.bit_length()) // 8)
    return -(-length // step) * step
