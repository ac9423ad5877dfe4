"""Which numbers of a replayed step differ from the recorded ones, and in which order they are
named.
"""

from __future__ import annotations

import math

from slime.observability.run_state import SentWeights, digest_of_digests
from slime.plugins.tools.replay.compare import compare_metrics, first_unequal, matches
from slime.weights.update import whole_frozen

ROW = {
    "rollout/step": 3.0,
    "time": 1.0,
    "perf/step_time": 2.0,
    "train/loss": 0.5,
    "rollout/raw_reward": 0.25,
    "train/critic-value_loss": 2.0,
    "train/ratio": None,
    "rollout/surplus_group_count": 0.0,
}
SAME = {
    "train/loss": 0.5,
    "rollout/raw_reward": 0.25,
    "train/critic-value_loss": 2.0,
    "train/ratio": math.nan,
}


def test_equal_steps_have_no_difference_and_times_are_not_compared() -> None:
    found = compare_metrics(ROW, SAME | {"perf/step_time": 9.0}, 0.0)
    assert found.names == (
        "rollout/raw_reward",
        "train/critic-value_loss",
        "train/loss",
        "train/ratio",
    )
    assert not found.differences and found.largest is None
    assert found.missing == ("rollout/surplus_group_count",)


def test_the_last_bit_counts_and_the_earliest_difference_comes_first() -> None:
    last_bit = math.nextafter(0.5, 1.0)
    found = compare_metrics(ROW, SAME | {"train/loss": last_bit, "rollout/raw_reward": 0.5}, 0.0)
    assert [one.name for one in found.differences] == ["rollout/raw_reward", "train/loss"]
    assert found.differences[1].replayed == last_bit


def test_a_tolerance_is_relative_above_one_and_absolute_below() -> None:
    near = SAME | {"train/critic-value_loss": 2.0 * (1 + 9e-5), "train/loss": 0.5 + 9e-5}
    found = compare_metrics(ROW, near, 1e-4)
    assert not found.differences and found.largest is not None and found.largest.name in near
    far = compare_metrics(ROW, SAME | {"train/critic-value_loss": 2.0 * (1 + 2e-4)}, 1e-4)
    assert [one.name for one in far.differences] == ["train/critic-value_loss"]


def test_a_clipped_fraction_may_differ_by_a_token_only_where_kernels_differ() -> None:
    row = {"train/pg_clipfrac": 0.01}
    assert not compare_metrics(row, {"train/pg_clipfrac": 0.02}, 1e-4).differences
    assert compare_metrics(row, {"train/pg_clipfrac": 0.02}, 0.0).differences
    assert compare_metrics(row, {"train/pg_clipfrac": 0.2}, 1e-4).differences


def test_a_number_that_is_no_longer_finite_differs_at_any_tolerance() -> None:
    found = compare_metrics(ROW, SAME | {"train/loss": math.inf, "train/ratio": 1.0}, 1e9)
    assert [one.name for one in found.differences] == ["train/loss", "train/ratio"]


def test_weights_are_compared_with_what_an_update_contained() -> None:
    whole = {"a": "1", "b": "2"}
    sent = SentWeights("0.1", digest_of_digests(whole), None, 2)
    assert matches(sent, whole, None) is True
    assert matches(sent, whole | {"b": "3"}, None) is False
    part = SentWeights("0.1", digest_of_digests({"a": "1"}), None, 1)
    assert matches(part, whole, lambda name: name == "b") is True, (
        "the update left out a frozen tensor"
    )
    assert matches(part, whole, None) is None
    held = {"l.q_proj.w": "1", "l.k_proj.w": "2", "l.v_proj.w": "3", "n.w": "4"}
    fused = {name: digest for name, digest in held.items() if name != "n.w"}
    part = SentWeights("0.2", digest_of_digests(fused), "float32", 3)
    frozen = lambda name: "q_proj" not in name  # noqa: E731
    assert matches(part, held, whole_frozen(frozen)) is True, "k and v were sent with q"


def test_the_first_tensor_that_differs_is_in_the_order_of_the_checkpoint() -> None:
    recorded = {"embed": "1", "layers.0": "2", "head": "3"}
    assert first_unequal(recorded, dict(recorded)) is None
    assert first_unequal(recorded, {"head": "0", "layers.0": "0", "embed": "1"}) == "layers.0"
