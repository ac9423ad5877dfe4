"""The weight of samples in the mean of a step, and packs whose tokens are divided among
context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from slime.backends.micro_batches import forward_only, weight
from slime.data.schedule import PackingSettings


def test_samples_count_by_their_share_of_a_rollout_or_by_their_tokens() -> None:
    """The rollout of the second sample has a third one, of 2 tokens, on another rank."""
    batch: dict[str, Any] = {"loss_masks": [[1, 1, 1, 0], [1, 1]], "rollout_mask_sums": [3.0, 4.0]}
    assert weight(batch, [[0], [1]], per_token=False) == pytest.approx(3 / 3 + 2 / 4)
    assert weight(batch, [[0], [1]], per_token=True) == 5
    assert weight(batch, [[1]], per_token=False) == pytest.approx(2 / 4)


def test_the_budget_is_that_of_a_rank_and_its_ranks_divide_each_sample() -> None:
    settings = PackingSettings(dynamic=True, max_tokens=4, forward_max_tokens=16)
    batch: dict[str, Any] = {"total_lengths": [16, 16, 16, 16], "tokens": [[0] * 16] * 4}
    alone = forward_only(settings, batch, context_size=1)
    both = forward_only(settings, batch, context_size=2)
    assert alone is not None and sorted(map(len, alone)) == [1, 1, 1, 1]
    assert both is not None and sorted(map(len, both)) == [2, 2]
