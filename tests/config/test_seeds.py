"""Seeds that follow from a run's seed."""

from __future__ import annotations

from slime.config.seeds import derive_seed


def test_a_seed_depends_on_the_run_on_its_purpose_and_on_every_number() -> None:
    seeds = {
        derive_seed(0, "data"), derive_seed(1, "data"), derive_seed(0, "sampling"), derive_seed(0, "data", 1),
        derive_seed(0, "data", 2), derive_seed(0, "data", 1, 2), derive_seed(0, "data", 12),
    }  # fmt: skip
    assert len(seeds) == 7


def test_a_seed_is_a_positive_number_of_31_bits() -> None:
    seeds = [derive_seed(number, "data") for number in range(200)]
    assert min(seeds) >= 0 and 2**30 < max(seeds) < 2**31
