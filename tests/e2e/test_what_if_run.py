"""``slime what-if`` on a real run: what one sample or one flag did to a step."""

from __future__ import annotations

import json

import pytest
from needs import ALL

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.more
def test_one_changed_thing_is_compared_with_the_step_as_it_was(runner, flags) -> None:
    tested = ("--eval-prompt-data", "own", flags[flags.index("--prompt-data") + 1])
    ran = runner.inline(
        *flags, "--num-rollout", 1, "--dump-details", "details", *tested, "--eval-interval", 1
    )
    assert ran.code == 0, ran.output

    def of_run(*words: object) -> dict:
        result = runner.command("what-if", ran.folder, "--step", 0, "--json", *words)
        assert result.code == 0, result.output
        found = json.loads(result.output)
        assert found["plain"]["exact"] and not found["plain"]["metrics"]["differences"]
        return found

    def what_if(*words: object) -> dict:
        return {one["name"]: one for one in of_run(*words)["tensors"]}

    # On the policy's own samples nothing is clipped, so that another range changes no bit.
    nothing = what_if("--eps-clip", "0.4")
    assert {one["relative"] for one in nothing.values()} == {0.0}
    for words in (("--without-sample", 1), ("--flip-reward", 1)) if ALL else ():
        gradient = what_if(*words)["gradient of optimizer step 0"]
        assert 0 < gradient["relative"] < 2, (words, gradient)
        assert gradient["cosine"] < 1 - 1e-6, (words, gradient)

    # The weights after the step as it was have the score that the run had.
    rows = of_run("--without-sample", 1, "--evaluate", "--run-its-code")["metrics"]
    before, after = next(row[1:] for row in rows if row[0] == "eval/own")
    assert before == ran.metrics("eval/step")[-1]["eval/own"] and after != before

    # The influences add up to the gradient, which a sample left out of it misses.
    ranked = of_run("--rank-samples")["samples"]
    sizes = [abs(one["share"]) for one in ranked]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    assert abs(sum(one["share"] for one in ranked) - 1) < 0.01, ranked
    assert {one["share"] for one in ranked if one["advantage"] == 0} <= {0.0}
