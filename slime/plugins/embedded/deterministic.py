"""Find row counts with which the result of a row does not depend on the rest of the batch, bit for bit.

Batching can change the bits of a row in three ways: a larger matrix product may round differently, an elementwise
function uses another code path for the tail of an array, and a batched attention may be divided differently. So
deterministic mode computes forwards of a few fixed row counts only. At startup, the engine measures which of these
counts give the same bits at every position in the block. A forward of one row always agrees with itself, so there is
always a result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from slime.plugins.embedded.rows import FIXED_LENGTH_STEP, Rows, row_context
from slime.plugins.embedded.runner import FIXED_ROWS, Runner

logger = logging.getLogger(__name__)

_CAPACITY = 192  # three attention lengths
_SLOTS = 16
_VECTOR = 32  # elements per iteration of torch's widest elementwise loop (AVX-512, two fp32 registers)
_EACH_ROW = ("Llama4TextExperts",)  # experts that compute all rows, and so the same number whatever the router says
_PARALLEL_GRAIN = 32768  # torch divides elementwise loops with more elements over threads


@dataclass(frozen=True)
class _Trial:
    """Random rows, and their slots and positions in the cache."""

    tokens: list[int]
    slots: list[int]
    positions: list[int]


def separate_rows_of_experts(model: PreTrainedModel) -> None:
    """Let experts compute one matrix product for each row and expert, with a copy of the expert's weights.

    Otherwise an expert computes all rows that are routed to it together, and their number changes the bits.
    """
    if any(type(module).__name__.endswith(_EACH_ROW) for module in model.modules()):
        return
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    elif hasattr(model.config.get_text_config(), "num_experts_per_tok"):
        logger.warning(
            "transformers has no row-wise experts for this model: results may depend on the rest of the batch"
        )


@torch.inference_mode()
def make_reproducible(runner: Runner, vocab_size: int, seed: int = 0) -> None:
    """Set ``runner.row_counts`` and ``runner.attend_alone`` so that results are reproducible, and empty the KV cache.

    A row count must pass two tests. First, elementwise loops over its rows have no tail, because the scalar code for a
    tail may round differently. Second, random rows through the whole model give the same bits as with the largest
    count, at any position in the block. If no count passes because of attention (the results of MKL depend on the
    alignment of buffers unless ``MKL_CBWR`` is set), the attention of each row is computed in its own call.
    """
    if runner.packed is not None:
        runner.packed.refresh()
    try:
        for runner.attend_alone in (False, True):
            aligned = [count for count in FIXED_ROWS if _no_tails(runner, count)]
            while aligned and aligned[-1] > 1:
                accepted = agreeing_counts(runner, aligned, vocab_size, torch.Generator().manual_seed(seed))
                if accepted:
                    runner.row_counts = accepted
                    return
                aligned.pop()  # the largest count depends on the position in the block; try again without it
    finally:
        runner.cache.clear()
    logger.warning("no row count above 1 is bitwise reproducible here, so deterministic mode computes row by row")
    runner.row_counts, runner.attend_alone = (1,), False


def _no_tails(runner: Runner, count: int) -> bool:
    # The sizes of the weight matrices are the widths of the activations. Each thread's share must have no tail either.
    threads = torch.get_num_threads()
    # No function is applied to the activations between the factors of an adapter.
    weights = [p for name, p in runner.model.named_parameters() if p.dim() == 2 and ".lora_" not in name]
    weights += [p for name, p in runner.model.named_parameters() if p.dim() == 3 and ".experts." in name]
    for width in {size for p in weights for size in p.shape[-2:]}:
        elements = count * width
        if elements % _VECTOR or (elements > _PARALLEL_GRAIN and elements % (_VECTOR * threads)):
            return False
    return True


def agreeing_counts(runner: Runner, counts: list[int], vocab: int, generator: torch.Generator) -> tuple[int, ...]:
    """Return the counts that give the same bits as the largest one.

    The result is empty if with the largest count the bits depend on the position of a row in the block.
    """
    largest = counts[-1]
    accepted = set(counts[:-1])
    for trial in _trials(largest, vocab, generator):
        _fill_cache(runner, trial, generator)
        reference = _probs(runner, trial, range(largest))
        turned = [(row + largest // 2 + 1) % largest for row in range(largest)]
        if not torch.equal(_probs(runner, trial, turned), reference[turned]):
            return ()
        for count in counts[:-1]:
            blocks = (turned[:count], turned[-count:])
            if not all(torch.equal(_probs(runner, trial, rows), reference[rows]) for rows in blocks):
                accepted.discard(count)
    return (*sorted(accepted), largest)


def _trials(rows: int, vocab: int, generator: torch.Generator) -> list[_Trial]:
    """Return a trial with rows of many sequences, as in decode, and one with several rows of each, as in prefill."""
    tokens = torch.randint(0, vocab, (rows,), generator=generator).tolist()
    chance = torch.randint(0, FIXED_LENGTH_STEP, (rows,), generator=generator).tolist()
    blocks = [row // _SLOTS % (_CAPACITY // FIXED_LENGTH_STEP) for row in range(rows)]
    decode = [block * FIXED_LENGTH_STEP + offset for block, offset in zip(blocks, chance, strict=True)]
    prompt = [FIXED_LENGTH_STEP - 5 + row % _SLOTS for row in range(rows)]
    return [
        _Trial(tokens, [row % _SLOTS for row in range(rows)], decode),
        _Trial(tokens, [row // _SLOTS % _SLOTS for row in range(rows)], prompt),
    ]


def _fill_cache(runner: Runner, trial: _Trial, generator: torch.Generator) -> None:
    """Fill the cache with random values."""
    runner.cache.resize(_SLOTS, _CAPACITY)
    _probs(runner, trial, [0])  # the tensors of the cache are allocated by the first forward
    for store in runner.cache.stores:
        for tensor in store.values():
            noise = torch.randn(tensor.shape[1:], generator=generator, dtype=torch.float32)
            tensor.copy_(noise.expand(tensor.shape))


def _probs(runner: Runner, trial: _Trial, rows: Iterable[int]) -> torch.Tensor:
    """Compute the probabilities ``[rows, vocab]`` of some rows of a trial in one forward."""
    picked = list(rows)
    keys = runner.adapters.keys
    block = Rows(
        [trial.tokens[row] for row in picked],
        [trial.positions[row] for row in picked],
        [0] * len(picked),
        [trial.slots[row] for row in picked],
        list(range(len(picked))),
        list(range(len(picked))),
        [keys[row % len(keys)] for row in picked],
    )
    step = row_context(runner.cache, block, True, runner.attend_alone)
    step.keep_states = False  # several rows of a trial may be in one slot, in any order
    logits = runner.forward(block, step, block.wanted)
    assert logits is not None
    return torch.softmax(logits.float(), dim=-1)
