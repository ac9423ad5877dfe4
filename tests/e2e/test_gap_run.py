"""``slime gap`` on a real run, whose engine computes in another dtype than its trainer."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("extra", "first"),
    [
        (("--rollout-dtype", "bfloat16"), "in bfloat16"),
        (("--rollout-top-p", 0.8), "rounding: another order of sums"),
    ],
)
def test_the_first_cause_is_what_the_flag_did(runner, flags, extra, first: str) -> None:
    ran = runner.inline(
        *flags, *extra, "--num-rollout", 2, "--save", "saved", "--save-interval", 1,
        "--dump-details", "details",
    )  # fmt: skip
    assert ran.code == 0, ran.output

    def gap(*words: object) -> str:
        result = runner.command("gap", ran.folder, "--step", 1, *words)
        assert result.code == 0, result.output
        return result.output

    found = json.loads(gap("--json"))
    assert found["first"].endswith(first), found
    explained = found["explained"]
    # What the tool compares is what the step itself has measured.
    rows = [json.loads(line) for line in (ran.folder / "metrics.jsonl").read_text().splitlines()]
    measured = next(row for row in rows if row.get("rollout/step") == 1)
    name = "train/train_rollout_logprob_abs_diff"
    assert explained["mean"] == pytest.approx(measured[name], rel=0.1, abs=1e-6)
    if explained["causes"]:
        # The rest is rounding too, of the engine's own kernels.
        assert explained["causes"][0]["side"] == "engine" and explained["closed"] > 0.15
        assert found["again"] < 0.1 * explained["mean"], "the engine's own path, once more"
        said = gap()
        assert f"first cause: {found['first']}" in said and "--rollout-dtype float32" in said, said
    else:
        assert explained["mean"] < 1e-5
