"""An estimator in a file of the user, through the real command: MaxRL of examples/maxrl."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "maxrl" / "maxrl.py"


def test_maxrl_trains_two_steps_on_rewards_relative_to_their_groups_mean(
    runner, flags, tmp_path
) -> None:
    import torch

    # found from the working directory, as the guide has it
    (tmp_path / "maxrl.py").write_text(EXAMPLE.read_text())
    dump = f"{tmp_path}/train/{{rollout_id}}.pt"
    result = runner.inline(
        *flags,
        "--advantage-estimator",
        "maxrl.py:MaxRL",
        "--num-rollout",
        2,
        "--save-debug-train-data",
        dump,
    )
    assert result.code == 0, result.output
    steps = result.metrics()
    assert len(steps) == 2 and all(row["train/grad_norm"] > 0 for row in steps)
    for rollout_id in range(2):
        saved = torch.load(f"{tmp_path}/train/{rollout_id}.pt", weights_only=False)
        by_group: dict[int, list[tuple[float, float]]] = {}
        for sample in saved["samples"]:
            by_group.setdefault(sample["group_indices"], []).append(
                (sample["raw_reward"], sample["rewards"])
            )
        assert len(by_group) == 4
        for members in by_group.values():
            mean = sum(raw for raw, _ in members) / len(members)
            expected = [(raw - mean) / mean if mean > 0 else 0.0 for raw, _ in members]
            assert [trained for _, trained in members] == pytest.approx(
                expected, rel=1e-5, abs=1e-6
            )


def test_a_mistake_in_the_class_is_told_before_anything_starts(runner, flags, tmp_path) -> None:
    (tmp_path / "half.py").write_text(
        "from slime.algorithms import Algorithm\n"
        "class Half(Algorithm):\n"
        "    def advantages(self, batch):\n"
        "        return batch['kl'], batch['kl']\n"
    )
    result = runner.inline(*flags, "--advantage-estimator", "half.py:Half")
    assert result.code == 2
    assert (
        "--advantage-estimator half.py:Half: class Half does not define group_baseline"
        in result.output
    )
    assert not result.folder.exists()
