"""Every formula against numbers worked by hand, in reference_numbers.yaml."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from slime.algorithms.rloo import leave_one_out
from slime.algorithms.value_loss import compute_value_loss
from slime.backends.megatron_utils import loss as off_policy_paths
from slime.utils import ppo_utils

DATA = yaml.safe_load((Path(__file__).parent / "reference_numbers.yaml").read_text())
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(ppo_utils, name) for name in ppo_utils.__all__},
    **{name: getattr(off_policy_paths, name) for name in off_policy_paths.__all__},
    "leave_one_out": leave_one_out,
    "compute_value_loss": compute_value_loss,
}
PLAIN_LISTS = ("rewards", "groups", "total_lengths", "response_lengths")


def to_tensors(name: str, value: Any) -> Any:
    if name in PLAIN_LISTS or not isinstance(value, list):
        return value
    if value and isinstance(value[0], list):
        return [to_tensors(name, x) for x in value]
    return torch.tensor(value, dtype=torch.int32 if name == "loss_masks" else torch.float64)


def to_lists(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.tolist()
    return [to_lists(y) for y in x] if isinstance(x, list | tuple) else x


def close(actual: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(close, actual, expected))
    return bool(actual == pytest.approx(expected, abs=DATA["tolerance"]))


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_case(case: dict[str, Any]) -> None:
    function = FUNCTIONS[case["function"]]
    inputs = {name: to_tensors(name, value) for name, value in case["inputs"].items()}
    wanted = case.get("gradient")
    if wanted:
        inputs[wanted["of"]].requires_grad_()
    if "args" in inspect.signature(function).parameters:
        inputs["args"] = SimpleNamespace(**case["args"])
    result = function(**inputs)
    actual = to_lists(result)
    if case["function"] in off_policy_paths.__all__:  # (loss, masks, metrics): the loss is what the case gives
        actual = actual[0]
    assert close(actual, case["expected"]), actual
    if wanted:
        first = result if isinstance(result, torch.Tensor) else result[0]
        first.sum().backward()
        assert close(inputs[wanted["of"]].grad.tolist(), wanted["is"]), inputs[wanted["of"]].grad


def test_every_documented_function_has_a_case() -> None:
    assert {case["function"] for case in DATA["cases"]} == set(FUNCTIONS)
