"""Every formula of the plug-in against numbers worked by hand, in reference_numbers.yaml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.plugins.estimators import (
    clip_cov,
    dppo,
    gdpo,
    gmpo,
    k2_5,
    kl_cov,
    maxrl,
    otb,
    rae,
    sapo,
    shared,
    vaco,
    vespo,
)
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
OURS = {
    name: one
    for name, one in ALGORITHMS.items()
    if one.__module__.startswith("slime.plugins.estimators.")
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        maxrl.relative_to_mean,
        shared.by_sign,
        sapo.compute_sapo_loss,
        vespo.sequence_sum_kl,
        vespo.vespo_weight,
        vespo.compute_vespo_loss,
        k2_5.log_ratio_penalty,
        k2_5.compute_k2_5_loss,
        dppo.binary_divergence,
        dppo.dppo_keep,
        dppo.compute_dppo_loss,
        gdpo.decoupled_advantages,
        gmpo.compute_gmpo_loss,
        vaco.vaco_keep,
        clip_cov.covariances,
        kl_cov.kth_largest,
        kl_cov.compute_kl_cov_loss,
        otb.path_noise,
        otb.token_baselines,
        rae.moved,
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
    check_all_are_there(DATA, FUNCTIONS, OURS)
