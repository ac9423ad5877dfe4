"""What the model wrote: the texts of every rollout as JSONL, and a few of them for the terminal."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.data.sample import flatten
from slime.observability.best_effort import best_effort

_SPECIAL = re.compile(r"<[|｜][^<>]{1,40}[|｜]>")
_USER_TURN = re.compile(r"<[|｜](?:im_start[|｜]>user|user[|｜]>|User[|｜]>)\s*(.*?)(?=<[|｜]|$)", re.DOTALL)


def write_samples(run_dir: Path, rollout_id: int, samples: Iterable[Any], kind: str = "rollout") -> Path:
    """Write ``<run>/samples/<kind>_<rollout_id>.jsonl``, one sample a line, replacing an older file.

    A full disk is logged, and no error.

    Args:
        run_dir: folder of the run.
        samples: flat or nested as groups.
        kind: ``rollout`` or ``eval-<data set>``.
    """
    folder = Path(run_dir) / "samples"
    path = folder / f"{kind.replace('/', '-')}_{rollout_id:06d}.jsonl"
    with best_effort("the texts of samples"):
        _write(path, rollout_id, samples)
    return path


def _write(path: Path, rollout_id: int, samples: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # half a surrogate pair, which UTF-8 does not know, is written as JSON's own escape of it
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for sample in flatten(samples):
            file.write(_line(sample_record(sample, rollout_id)) + "\n")
    temporary.replace(path)


def _line(record: dict[str, Any]) -> str:
    """A record as JSON; what users' functions put into it and JSON cannot hold is written as its ``repr``."""
    try:
        return json.dumps(record, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({name: _plain(value) for name, value in record.items()}, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return reprlib.repr(value)
    return value


def sample_record(sample: Any, rollout_id: int) -> dict[str, Any]:
    """The readable part of one sample: no token ids, no log-probs, no media."""
    status = getattr(sample, "status", None)
    return {
        "rollout": rollout_id,
        "group_index": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": getattr(status, "value", status),
        "response_length": sample.response_length,
        "weight_versions": list(getattr(sample, "weight_versions", None) or []),
        "version_spans": list(getattr(sample, "version_spans", None) or []),
        "metadata": getattr(sample, "metadata", None) or {},
    }


def preview(samples: Iterable[Any], count: int = 2, width: int = 160) -> list[str]:
    """A few samples as one line each: the best and the worst reward first, so that both are seen."""
    ranked = sorted(flatten(samples), key=lambda sample: _number(sample.reward), reverse=True)
    chosen = ranked[: (count + 1) // 2] + ranked[len(ranked) - count // 2 :] if len(ranked) > count else ranked
    return [
        f"reward {_reward(sample.reward)} │ {_short(_last_user_text(sample.prompt), width // 2)} → "
        f"{_short(sample.response, width // 2)} │ label {sample.label}"
        for sample in chosen
    ]


def _number(reward: Any) -> float:
    if isinstance(reward, dict):
        numbers = [value for value in reward.values() if isinstance(value, int | float)]
        return float(numbers[0]) if numbers else 0.0
    return float(reward) if isinstance(reward, int | float) else 0.0


def _reward(reward: Any) -> str:
    return f"{reward:g}" if isinstance(reward, int | float) else str(reward)


def _last_user_text(prompt: Any) -> str:
    """What was asked last: of messages, or of a prompt that a chat template has rendered."""
    if isinstance(prompt, str):
        turns = _USER_TURN.findall(prompt)
        return str(turns[-1]) if turns else prompt
    texts = [message.get("content") for message in prompt if message.get("role") == "user"]
    return str(texts[-1]) if texts else ""


def _short(text: str, width: int) -> str:
    """One line without special tokens; the middle goes when it is too long: answers stand at the end."""
    line = " ".join(_SPECIAL.sub(" ", text).split())
    head = (width - 1) // 2
    return line if len(line) <= width else f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"
