"""Check that a verifier can read the labels. This runs for every row of a data set before a run starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from slime.plugins.rewards import code, ifbench
from slime.rollout.rm_hub import gpqa
from slime.rollout.rm_hub.last_number import number_label
from slime.rollout.rm_hub.math import gold_answer
from slime.rollout.rm_hub.text import normalize_math

Check = Callable[[object, Mapping[str, object]], str | None]


def check_label(rm_type: str, label: object, metadata: Mapping[str, object] | None = None) -> str | None:
    """Describe what is wrong with a label for a reward type, or return None.

    The check is cheap: it starts no process and uses no symbolic parser.

    Args:
        rm_type: A value of ``--rm-type``, also with the prefix ``boxed_``. Unknown types pass, as do types that read no
            label.
        label: The label of the row.
        metadata: The metadata of the row. Its ``rm_type`` overrides the argument, as it does in the run.
    """
    metadata = metadata or {}
    name = str(metadata.get("rm_type") or rm_type or "").strip().removeprefix("boxed_")
    check = _CHECKS.get(name)
    problem = check(label, metadata) if check else None
    return None if problem is None else f"reward type {name}: {problem}"


def _present(label: object) -> str | None:
    if label is None:
        return "the row has no label"
    if isinstance(label, (dict, list)):
        return f"the label is a {type(label).__name__}, not a text or number: {str(label)[:80]!r}"
    return "the label is empty" if not str(label).strip() else None


def _math(label: object, _: Mapping[str, object]) -> str | None:
    missing = _present(label)
    if missing:
        return missing
    gold = gold_answer(label)
    if not normalize_math(gold):
        return f"label {str(label)[:80]!r} contains nothing but spaces and signs"
    braces = re.sub(r"\\.", "", gold, flags=re.DOTALL)
    if braces.count("{") != braces.count("}"):
        return f"label {gold[:80]!r} has unbalanced braces"
    prose = re.sub(r"\\[A-Za-z]+", " ", gold)
    if not re.search(r"[\d=^_+*/<>\\]", gold) and len(re.findall(r"[A-Za-z]{2,}", prose)) > 4:
        return f"label {gold[:80]!r} reads like a sentence, not a mathematical answer (type f1 compares texts)"
    return None


def _number(label: object, _: Mapping[str, object]) -> str | None:
    missing = _present(label)
    return missing or (None if number_label(label) is not None else f"label {str(label)[:80]!r} is not a number")


def _text(label: object, _: Mapping[str, object]) -> str | None:
    if isinstance(label, list) and label:
        return next((problem for part in label if (problem := _present(part))), None)
    return _present(label)


def _dapo(label: object, _: Mapping[str, object]) -> str | None:
    missing = _present(label)
    return missing or (None if "\n" not in str(label).strip() else f"label {str(label)[:80]!r} has more than one line")


def _gpqa(label: object, metadata: Mapping[str, object]) -> str | None:
    return gpqa.unreadable(label, metadata) if gpqa.compute_gpqa_reward("", label, metadata) is None else None


_CHECKS: dict[str, Check] = {
    "code": code.unreadable,
    "math": _math,
    "deepscaler": _math,
    "dapo": _dapo,
    "f1": _text,
    "gpqa": _gpqa,
    "last_number": _number,
    "ifbench": lambda _, metadata: ifbench.unreadable(metadata),
}
