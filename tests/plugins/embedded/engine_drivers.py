"""Drive scheduler and runner without threads or HTTP."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch

from slime.plugins.embedded.loading import EngineOptions, Loaded, load_engine
from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams
from slime.plugins.embedded.sequence import Sequence


def load(model: Path, **options: Any) -> Loaded:
    settings = {"max_running_requests": 16, "max_total_tokens": 8192, **options}
    return load_engine(EngineOptions(str(model), **settings))


def make(
    ids: Many[int], rid: str = "r", seed: int = 0, start_len: int = -1, top: int = 0, **params: Any
) -> Sequence:
    sampling = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 8, **params})
    request = GenerateRequest(
        rid, list(ids), sampling, return_logprob=True, logprob_start_len=start_len
    )
    request.top_logprobs_num = top
    return Sequence(request, 0, seed)


def step(loaded: Loaded) -> list[Sequence] | None:
    """One step; the sequences that finished, or None when nothing was to do."""
    scheduler = loaded.engine.scheduler
    plan = scheduler.plan()
    if plan is None:
        return None
    return scheduler.commit(plan, loaded.engine.compute(plan))


def finish(loaded: Loaded, sequences: Many[Sequence] = ()) -> None:
    """Add sequences and run until nothing is left."""
    for sequence in sequences:
        loaded.engine.scheduler.add(sequence)
    while step(loaded) is not None:
        pass


@torch.inference_mode()
def reference_logprobs(model: Any, tokens: Many[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs ``[length - 1]`` of ``tokens[1:]`` by a plain transformers forward of the whole
    sequence.
    """
    logits = (
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
        / temperature
    )
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(list(tokens[1:]))[:, None])[
        :, 0
    ]


def result(sequence: Sequence) -> tuple[list[int], list[float], list[float]]:
    return sequence.output_ids, sequence.output_logprobs, sequence.input_logprobs
