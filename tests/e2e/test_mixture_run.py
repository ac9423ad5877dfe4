"""A run on two data sets, killed after a snapshot and resumed: the same prompts and losses as without."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


def test_a_mixture_resumes_exactly_and_has_a_curve_for_each_data_set(
    runner, flags, prompts, tmp_path
):
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    file = tmp_path / "mixture.yaml"
    file.write_text(
        f"- {{name: plain, path: {prompts}, weight: 2, pass_rate: [0, 0.9], estimator: kl_cov}}\n"
        f"- {{name: other, path: {other}, sampling: {{max_new_tokens: 3}}, estimator: rloo}}\n"
    )
    common = list(flags)
    at = common.index("--prompt-data")
    common[at : at + 2] = ["--prompt-mixture", file]
    common += ["--deterministic", "--log-samples", "all", "--num-rollout", 4]
    whole = runner.inline(*common, name="whole")
    assert whole.code == 0, whole.output
    first = runner.inline(
        *common, "--num-rollout", 2, "--save", tmp_path / "save", "--save-interval", 2, name="first"
    )
    assert first.code == 0, first.output
    rest = runner.inline(*common, "--load", tmp_path / "save", name="rest")
    assert rest.code == 0, rest.output
    names = ("train/loss", "train/grad_norm", "rollout/raw_reward")
    steps, resumed = (
        {row["rollout/step"]: [row[name] for name in names] for row in run.metrics("train/loss")}
        for run in (whole, rest)
    )
    # The resumed run begins with the row of the step that the snapshot holds.
    assert resumed == {step: steps[step] for step in (1, 2, 3)}
    curves = {key for row in whole.metrics() for key in row if key.startswith("rollout/source/")}
    assert curves == {
        f"rollout/source/{name}/{what}"
        for name in ("plain", "other")
        for what in ("raw_reward", "share")
    }
    lengths: dict[str, set[int]] = {"plain": set(), "other": set()}
    for path in whole.folder.glob("samples/*.jsonl"):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            lengths[sample["metadata"]["source_name"]].add(sample["response_length"])
    assert max(lengths["other"]) == 3 < max(lengths["plain"])
