"""What ``slime what-if`` changes in samples, and how it compares tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from slime.cli.main import main
from slime.data.sample import Sample
from slime.plugins.tools.replay import ReplayError
from slime.plugins.tools.replay.capture import save_tensors
from slime.plugins.tools.replay.what_if import ChangedSamples, compare, compare_folders


def test_samples_are_left_out_and_rewards_mirrored() -> None:
    samples = [Sample(index=i, reward=r) for i, r in ((7, -1.0), (8, 3.0), (9, 0.0))]
    ChangedSamples(without=(7,), flipped=(8, 9))(samples)
    assert [s.reward_timed_out for s in samples] == [True, False, False]
    assert [s.reward for s in samples] == [-1.0, -1.0, 2.0]


def test_unknown_samples_and_rewards_that_are_no_number_are_told() -> None:
    samples = [Sample(index=7, reward={"accuracy": 1.0}), Sample(index=8, reward=1.0)]
    with pytest.raises(ReplayError, match="17"):
        ChangedSamples(without=(17,))(samples)
    with pytest.raises(ReplayError, match="sample 7"):
        ChangedSamples(flipped=(7,))(samples)


def test_tensors_are_compared_by_norm_and_angle() -> None:
    plain = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    same = compare(plain, plain, "same")
    assert (same.before, same.after, same.cosine, same.relative) == (5.0, 5.0, 1.0, 0.0)
    turned = compare(plain, {"a": torch.tensor([0.0, 3.0]), "b": plain["b"]}, "turned")
    assert turned.cosine == pytest.approx(16 / 25)
    assert turned.relative == pytest.approx(math.sqrt(18) / 5)
    assert math.isnan(compare(plain, {}, "gone").cosine)


def test_gradients_are_shown_by_layer_and_the_update_as_a_whole(tmp_path: Path) -> None:
    for folder, scale in (("plain", 1.0), ("changed", 2.0)):
        weights = {"model.layers.0.a": torch.ones(2), "head": torch.ones(3)}
        gradients = {name: scale * tensor for name, tensor in weights.items()}
        after = {name: tensor - 0.5 * scale for name, tensor in weights.items()}
        save_tensors(tmp_path / folder, "actor_gradients_0.safetensors", gradients)
        save_tensors(tmp_path / folder, "weights_before.safetensors", weights)
        save_tensors(tmp_path / folder, "weights_after.safetensors", after)
    found = list(compare_folders(tmp_path / "plain", tmp_path / "changed"))
    assert [one.name.strip() for one in found] == [
        "gradient of optimizer step 0",
        "layer 0",
        "head",
        "change of the weights",
    ]
    assert all(one.relative == pytest.approx(1.0) for one in found)
    assert all(one.cosine == pytest.approx(1.0) for one in found)


def test_a_change_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(tmp_path), "--step", "3"]) == 1
    assert "--without-sample" in capsys.readouterr().err
