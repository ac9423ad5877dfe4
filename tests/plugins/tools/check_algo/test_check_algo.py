"""``slime check-algo`` names planted errors, and says of slime's own estimators what their design
says. What it takes for true is checked in ``test_tiny_worlds.py``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from slime.algorithms.grpo import Rloo
from slime.cli.main import main
from slime.plugins.tools.check_algo import DESIGN, design_of
from slime.plugins.tools.check_algo.checks import CHECKS, Checks, Finding, run_checks
from slime.plugins.tools.check_algo.lab import CheckAlgoError, make_args
from slime.registry import parts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from planted_estimators import PLANTED  # noqa: E402

SMALL = "--n-samples-per-prompt", "2"
OF_EACH_COMMIT = ("grpo", "ppo", "gspo", "cispo", "reinforce_plus_plus")
"""The estimators that each commit checks; the long circle checks the others."""


def planted(name: str) -> str:
    return f"{HERE / 'planted_estimators.py'}:{name}"


def finding(check: str, algorithm: str, *flags: str) -> Finding:
    return CHECKS[check](Checks(make_args(algorithm, flags)))


@pytest.mark.parametrize("error", PLANTED, ids=lambda error: error.__name__)
def test_each_planted_error_is_named_first(error: type[Rloo]) -> None:
    args = make_args(planted(error.__name__))
    first = next(name for name, found in run_checks(Checks(args)) if not found.holds)
    assert first == PLANTED[error]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_COMMIT else [pytest.mark.long])
        for name in parts("algorithm")
    ],
)
def test_slimes_own_estimators_are_as_designed(name: str) -> None:
    failing = {check for check, found in run_checks(Checks(make_args(name))) if not found.holds}
    assert failing == DESIGN[name].keys()


def test_each_reason_names_its_source() -> None:
    reasons = [reason for row in DESIGN.values() for reason in row.values()]
    without = [reason for reason in reasons if not re.search(r"20\d\d|\d{4}\.\d{5}", reason)]
    assert reasons and not without


def design(estimator: str) -> tuple[str, dict[str, str]]:
    return design_of(estimator, vars(make_args(estimator)))


def test_a_class_has_the_reasons_of_what_it_derives_from() -> None:
    assert design("luspo") == ("luspo", dict(DESIGN["luspo"]))
    assert design(planted("MeanOverLeaves")) == ("rloo", {})
    base, reasons = design(planted("ByDesign"))
    assert base == "rloo"
    assert "direction" in reasons


def test_flags_of_the_run_are_part_of_what_is_checked() -> None:
    assert not finding("direction", "grpo").holds
    assert finding("direction", "grpo", "--disable-grpo-std-normalization").holds
    per_response, per_token = (
        finding("length", "rloo", *flags) for flags in ((), ("--calculate-per-token-loss",))
    )
    assert per_response.holds and per_token.holds
    assert per_response.text != per_token.text
    assert finding("spread of other groups", "rloo").holds
    assert not finding("spread of other groups", "rloo", "--normalize-advantages").holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--use-opsm",), ("--normalize-advantages",), ("--use-tis",), ("--entropy-coef", "0.01")],
    ids=" ".join,
)
def test_flags_of_slime_fail_only_what_they_say(flags: tuple[str, ...]) -> None:
    args = make_args("rloo", flags)
    failing = {check for check, found in run_checks(Checks(args)) if not found.holds}
    assert failing == design_of(args.advantage_estimator, vars(args))[1].keys()


@pytest.mark.parametrize(("kind", "lowers"), [("k1", False), ("k2", True), ("k3", True)])
def test_a_kl_in_the_loss_must_lower_the_kl(kind: str, lowers: bool) -> None:
    flags = "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", kind
    assert finding("regulariser", "rloo", *flags).holds == lowers


def test_a_loss_of_ones_own_is_checked() -> None:
    def flags(loss: str) -> tuple[str, ...]:
        return "--loss-type", "custom_loss", "--custom-loss-function-path", planted(loss)

    right, wrong = (flags(loss) for loss in ("reinforce", "reinforce_without_mean"))
    assert finding("direction", "rloo", *right).holds
    assert finding("micro batches", "rloo", *right).holds
    assert not finding("micro batches", "rloo", *wrong).holds


def test_older_samples_are_corrected_in_the_way_that_the_flags_say() -> None:
    assert finding("ratio", "rloo", "--use-tis").holds
    assert not finding("ratio", "rloo", "--get-mismatch-metrics").holds  # it only measures


@pytest.mark.slow
def test_the_command_prints_bias_checks_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-algo", "rloo", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "verdict: unbiased" in lines
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in CHECKS)
    on_policy = next(line for line in lines if line.startswith("staleness 0"))
    assert "0.0%" in on_policy and "1.0000" in on_policy


@pytest.mark.slow
def test_a_deviation_that_the_class_declares_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check-algo", planted("ByDesign"), *SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"].startswith("biased by design: one scale")
    states = {one["name"]: one["state"] for one in result["checks"]}
    assert states["leaves"] == "by design" and states["order"] == "ok"
    assert result["rows"][0]["name"] == "staleness 0"


def test_an_error_of_the_class_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-algo", planted("Raises")]) == 1
    assert "RuntimeError: no advantages today" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("no_such_estimator",), ("rloo", "--epsclip", "1")])
def test_wrong_words_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(CheckAlgoError):
        make_args(words[0], words[1:])
    assert main(["check-algo", *words]) == 1
