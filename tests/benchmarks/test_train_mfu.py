"""The batches of ``benchmarks/train_mfu.py``."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import train_mfu


@pytest.mark.parametrize("tokens", [8192, 32768, 65536, 131072, 100_000])
@pytest.mark.parametrize("mean", [272, 1024, 8192, 200_000])
def test_micro_batches_have_exactly_the_tokens_and_samples_keep_a_response(
    tokens: int, mean: int
) -> None:
    for rank in range(64):
        lengths = train_mfu.sample_lengths(random.Random(rank), tokens, mean, 256)
        assert sum(lengths) == tokens and min(lengths) >= 256 + 16
        assert len(lengths) == max(tokens // mean, 1)


@pytest.mark.parametrize("rank", range(4))
def test_a_batch_of_32_samples(rank: int) -> None:
    options = argparse.Namespace(
        tokens=32768, sample_tokens=1024, prompt_tokens=256, micro_batches=2
    )
    batch = train_mfu.make_batch(options, 512, rank, 2)
    for indices in batch["micro_batch_indices"]:
        assert sum(len(batch["tokens"][i]) for i in indices) == 32768
    responses = batch["response_lengths"]
    assert len(responses) == 64 and min(responses) >= 16 and max(responses) > 2 * min(responses)
    assert [len(tokens) - 256 for tokens in batch["tokens"]] == responses
