"""Every formula of the core against numbers worked by hand, in reference_numbers.yaml."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

from slime.algorithms import baselines, grpo, losses, mis, reinforce_plus_plus
from slime.algorithms.losses import KL_TYPES
from slime.backends.loss import LOSSES
from slime.backends.megatron_utils import loss as corrections
from slime.utils import ppo_utils
from tests.every_algorithm import ALGORITHMS
from tests.worked_numbers import (
    by_name,
    check_all_are_there,
    check_estimator,
    check_function,
    check_loss,
    read_cases,
)

DATA = read_cases(__file__)
CORE = {
    name: one for name, one in ALGORITHMS.items() if one.__module__.startswith("slime.algorithms.")
}
WITHOUT_FORMULA = {"get_log_probs_and_entropy", "get_responses", "policy_loss_function"}
"""Helpers of custom losses that call the other functions; backends/test_import_paths.py compares
them with these.
"""
FUNCTIONS: dict[str, Any] = {
    name: getattr(module, name)
    for module in (ppo_utils, corrections)
    for name in module.__all__
    if name not in WITHOUT_FORMULA
} | {
    function.__name__: function
    for function in (
        baselines.centred,
        baselines.standardized,
        grpo.leave_one_out,
        baselines.overlong_penalty,
        losses.reverse_kl,
        losses.distilled_advantages,
        losses.compute_sft_loss,
        losses.compute_value_loss,
        reinforce_plus_plus.normalize_advantages,
    )
}


@by_name(DATA["functions"])
def test_function(case: dict[str, Any]) -> None:
    check_function(case, FUNCTIONS)


@by_name(DATA["estimators"])
def test_estimator(case: dict[str, Any]) -> None:
    check_estimator(case)


@by_name(DATA["losses"])
def test_loss(case: dict[str, Any]) -> None:
    check_loss(case)


def test_nothing_is_missing_from_the_file() -> None:
    check_all_are_there(DATA, FUNCTIONS, CORE)
    functions = DATA["functions"]
    # token_sum is the losses of slime.Session, which tests/e2e/test_primitives.py computes.
    assert {case["loss"] for case in DATA["losses"]} == set(LOSSES) - {"token_sum"}
    assert {case["inputs"].get("kl_loss_type") for case in functions} >= set(KL_TYPES)
    settings = [case["args"] for case in functions if case["function"] == "compute_mis_weights"]
    assert {(a["tis_level"], a["tis_mode"]) for a in settings if "tis_mode" in a} == set(
        product(get_args(mis.Level), get_args(mis.Mode))
    )
