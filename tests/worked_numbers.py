"""Formulas against numbers worked by hand: the files ``reference_numbers.yaml`` and how a case of
each is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from slime.algorithms.sequences import Identity
from slime.backends.advantages import AdvantageSettings, compute_advantages
from slime.backends.loss import LossSettings, TokenBatch, compute_loss
from slime.config.args import Args
from slime.data.rewards import PARTS_KEY, post_process_rewards
from slime.data.sample import Sample

PLAIN_LISTS = (
    "rewards",
    "total_lengths",
    "response_lengths",
    "lengths",
    "positive",
    "negative",
    "groups",
    "places",
    "parts",
)
MASKS = ("loss_masks", "mask", "loss_mask")
TOLERANCE = 1e-5


def read_cases(test_file: str) -> dict[str, Any]:
    """The cases of ``reference_numbers.yaml`` beside a test."""
    data: dict[str, Any] = yaml.safe_load(
        (Path(test_file).parent / "reference_numbers.yaml").read_text()
    )
    return data


def by_name(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize(
        "case",
        cases,
        ids=lambda case: case.get("name") or f"{case['estimator']}: {case['formula']}",
    )


def to_tensors(name: str, value: Any) -> Any:
    if name in PLAIN_LISTS or not isinstance(value, list):
        return value
    if name != "logits" and value and isinstance(value[0], list):
        return [to_tensors(name, x) for x in value]
    whole = name in MASKS or name == "targets"
    return torch.tensor(value, dtype=torch.int64 if whole else torch.float64)


def to_lists(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.tolist()
    return [to_lists(y) for y in x] if isinstance(x, list | tuple) else x


def close(actual: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(close, actual, expected))
    return bool(actual == pytest.approx(expected, abs=TOLERANCE))


def run_args(changes: dict[str, Any] | None) -> Args:
    """The run's own defaults, and what the case changes; also names of ``--custom-config-path``."""
    args = Args()
    for name, value in ({"eps_clip_high": args.eps_clip} | (changes or {})).items():
        setattr(args, name, value)
    return args


def check_function(case: dict[str, Any], functions: dict[str, Callable[..., Any]]) -> None:
    """A function of ``functions``: its result, the masks of a correction, and the gradient of the
    first result.
    """
    function = functions[case["function"]]
    inputs = {name: to_tensors(name, value) for name, value in case["inputs"].items()}
    wanted = case.get("gradient")
    if wanted:
        inputs[wanted["of"]].requires_grad_()
    parameters = inspect.signature(function).parameters
    if "args" in parameters:
        inputs["args"] = SimpleNamespace(**case["args"])
    if "reduce" in parameters:
        inputs["reduce"] = Identity()
    result = function(**inputs)
    if "masks" in case:  # a correction: (loss, masks, metrics)
        result, masks, _ = result
        assert close(to_lists(masks), case["masks"]), masks
    assert close(to_lists(result), case["expected"]), result
    if wanted:
        first = result if isinstance(result, Tensor) else result[0]
        first.sum().backward()
        assert close(inputs[wanted["of"]].grad.tolist(), wanted["is"]), inputs[wanted["of"]].grad


def check_estimator(case: dict[str, Any]) -> None:
    """From raw rewards and their groups to the advantages (and returns) of every token."""
    args = run_args({"advantage_estimator": case["estimator"]} | case.get("args", {}))
    masks = [torch.tensor(mask) for mask in case["loss_masks"]]
    samples = [
        Sample(
            index=i,
            group_index=group,
            reward=reward,
            response_length=len(mask),
            metadata={PARTS_KEY: parts},
        )
        for i, (group, reward, mask, parts) in enumerate(
            zip(
                case["groups"],
                case["rewards"],
                masks,
                case.get("parts") or [{}] * len(masks),
                strict=True,
            )
        )
    ]
    raw, rewards = post_process_rewards(args, samples, case["groups"])
    assert raw == case["rewards"]
    lengths = [len(mask) for mask in masks]
    batch: dict[str, Any] = {
        "rewards": rewards,
        "loss_masks": masks,
        "response_lengths": lengths,
        "total_lengths": [n + 2 for n in lengths],
        "group_indices": case["groups"],
        "metadata": case.get("metadata"),
    }
    for name in ("log_probs", "ref_log_probs", "teacher_log_probs", "values", "squared_probs"):
        if name in case:
            batch[name] = to_tensors(name, case[name])
    compute_advantages(AdvantageSettings.from_args(args), batch, Identity())
    assert close(to_lists(batch["advantages"]), case["advantages"]), batch["advantages"]
    if "returns" in case:
        assert close(to_lists(batch["returns"]), case["returns"]), batch["returns"]


def cross_entropy(
    args: Any, batch: dict[str, Any], logits: Tensor, mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return mean(torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")), {}


def check_loss(case: dict[str, Any]) -> None:
    """One optimizer step: its loss, and the gradient with respect to what the model gives."""
    kind, given = (
        case["loss"],
        {name: to_tensors(name, value) for name, value in case["tokens"].items()},
    )
    args = run_args(
        {"loss_type": "policy_loss" if kind == "value_loss" else kind} | case.get("args", {})
    )
    args.advantage_estimator = case.get("estimator", "grpo")
    args.custom_loss_function_path = f"{__file__}:cross_entropy"
    leaf = given[
        {"value_loss": "values", "custom_loss": "logits"}.get(kind, "log_probs")
    ].requires_grad_()
    lengths, siblings = given["response_lengths"], case.get("siblings", 1)
    sums = torch.stack([part.sum() for part in given["loss_mask"].split(lengths)]).float()
    tokens = TokenBatch(
        total_lengths=[n + 2 for n in lengths],
        rollout_mask_sums=torch.cat(
            [part.sum().repeat(len(part)) for part in sums.split(siblings)]
        ),
        **given,
    )
    settings = LossSettings.from_args(args)
    loss, _ = compute_loss(
        settings, tokens, num_rollouts=len(lengths) / siblings, num_tokens=float(sums.sum())
    )
    assert close(loss.item(), case["expected"]), loss
    loss.backward()
    assert leaf.grad is not None and close(leaf.grad.tolist(), case["gradient"]), leaf.grad


def check_all_are_there(
    data: dict[str, Any], functions: dict[str, Any], algorithms: dict[str, Any]
) -> None:
    """Each function and estimator has a case, and each estimator with a loss of its own one of its
    loss.
    """
    from slime.algorithms.grpo import Grpo

    cases = [*data["functions"], *data["estimators"], *data["losses"]]
    assert {case["function"] for case in data["functions"]} == set(functions)
    assert {case["estimator"] for case in data["estimators"]} == set(algorithms)
    members = ("ppo_kl", "policy_loss", "sequence_loss", "pg_reducer")
    with_own_loss = {
        name
        for name, one in algorithms.items()
        if any(getattr(one, x) is not getattr(Grpo, x) for x in members)
    }
    assert {case.get("estimator") for case in data["losses"]} >= with_own_loss
    for case in cases:
        assert case["formula"] and str(case["worked"]), case
