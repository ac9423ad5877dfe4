"""What of all layouts each commit runs has every pair of their properties."""

from __future__ import annotations

import megatron_lora_ranks
import megatron_ranks
import pytest
from pairwise import cover, properties

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("ranks", [megatron_ranks, megatron_lora_ranks])
def test_every_pair_is_in_a_layout_that_runs(ranks: object) -> None:
    everything = vars(ranks)["EVERY_LAYOUT"]
    plan = cover(everything)
    missing = set().union(*map(properties, everything)) - set().union(*map(properties, plan))
    assert not missing
    assert {layout.model for layout in plan} == {layout.model for layout in everything}
    assert len(plan) < 0.7 * len(everything)
