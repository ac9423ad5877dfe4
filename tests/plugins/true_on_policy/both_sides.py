"""Samples of an engine, and the trainer's log-probs of the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from engine_drivers import load, make, step
from fsdp_helpers import make_args

from slime.backends.create import create_backend
from slime.backends.fsdp.backend import FsdpBackend
from slime.data.fields import RankBatch
from slime.plugins.embedded.sequence import Sequence

TEMPERATURE = 0.8
FLAGS: dict[str, Any] = dict(
    train_dtype="bfloat16", rollout_temperature=TEMPERATURE, true_on_policy=True
)


def generate(folder: Path, vocab: int, **options: Any) -> list[Sequence]:
    """Twelve samples that begin at different steps, some with a prompt in common, and with the
    log-probs of their prompts."""
    loaded = load(folder, dtype="bfloat16", **options)
    rng = random.Random(0)
    common = [rng.randrange(vocab) for _ in range(9)]
    sequences = []
    for i in range(12):
        own = [rng.randrange(vocab) for _ in range(rng.randrange(1, 20))]
        prompt = common if i % 3 == 0 else common + own if i % 3 == 1 else own
        length = rng.randrange(2, 20)
        settings = dict(temperature=TEMPERATURE, max_new_tokens=length, start_len=0)
        sequences.append(make(prompt, f"r{i}", seed=i, **settings))
    waiting = list(sequences)
    steps = 0
    while True:
        arriving = 5 if steps == 0 else steps % 2
        for sequence in waiting[:arriving]:
            loaded.engine.scheduler.add(sequence)
        del waiting[:arriving]
        steps += 1
        if step(loaded) is None and not waiting:
            return sequences


def make_trainer(
    folder: Path, rank: int = 0, ranks: int = 1, port: int = 0, **flags: Any
) -> FsdpBackend:
    args = make_args(folder, **FLAGS | flags)
    if ranks == 1:
        return FsdpBackend(args, "actor", 0, 1, torch.device("cpu"))
    backend = create_backend(args, "actor", rank, ranks, "127.0.0.1", port)
    assert isinstance(backend, FsdpBackend)
    return backend


def trainer_scores(
    backend: FsdpBackend, sequences: list[Sequence], order: list[int], size: int
) -> list[float]:
    """The log-probs of all samples, scored in this order and in packs of so many samples."""
    picked = [sequences[i] for i in order]
    responses = [len(s.output_ids) for s in picked]
    batch = RankBatch(
        dict(
            tokens=[torch.tensor([*s.request.input_ids, *s.output_ids]) for s in picked],
            total_lengths=[len(s.request.input_ids) + len(s.output_ids) for s in picked],
            response_lengths=responses,
            group_indices=[0] * len(picked),
            micro_batch_indices=[
                list(range(i, min(i + size, len(picked)))) for i in range(0, len(picked), size)
            ],
        )
    )
    found = dict(zip(order, backend.log_probs(batch)["log_probs"], strict=True))
    return [value for i in sorted(found) for value in found[i].tolist()]
