"""What a snapshot says of the run that made it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import NotRequired, TypedDict

from slime.checkpoint.files import FileEntry
from slime.types import JsonObject, JsonValue

_LIBRARIES = ("torch", "transformers", "numpy", "ray", "slime", "megatron-core", "sglang")
# Where things lie and how much is shown may differ between a run and its continuation.
WHERE_NOT_WHAT = frozenset(
    {"load", "save", "save_hf", "output_dir", "run_name", "ckpt_step", "override", "num_rollout", "sglang_router_ip",
     "sglang_router_port", "threads_per_process", "save_interval", "save_keep_last", "save_retain_interval",
     "phase_timeout", "replay_schedule", "max_restarts"}
)  # fmt: skip

# With another value, the rest of an epoch repeats some prompts and leaves out others.
DECIDES_PROMPTS = ("rollout_seed", "rollout_shuffle")


class RunFacts(TypedDict, total=False):
    """What is the same in all snapshots that one process writes."""

    attempt: int
    """How often the run had been resumed."""
    world_size: int
    seed: int
    settings: JsonObject
    """See :func:`settings`."""


class Facts(RunFacts):
    """What the run says of itself."""

    rollout_id: int
    """The rollout that was trained last."""
    weight_version: NotRequired[str]
    metrics: NotRequired[dict[str, float]]
    """The metrics of the step, as far as they were known."""


class Manifest(Facts):
    """The file ``manifest.json`` of a snapshot."""

    format: int
    sequence: int
    """The snapshots of a folder are counted in the order of their commits."""
    time: str
    libraries: dict[str, str]
    files: list[FileEntry]


class ResumeError(ValueError):
    """The run cannot go on from this snapshot with these settings; the message says which to change."""


def library_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, as installed here; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def settings(values: Mapping[str, object]) -> JsonObject:
    """What shapes a run, of all its settings by name, as JSON gives it back."""
    kept = {name: value for name, value in values.items() if name not in WHERE_NOT_WHAT}
    plain: JsonObject = json.loads(json.dumps(kept, default=str))
    return plain


def changes(then: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[str]:
    """``name: old -> new`` for each of :func:`settings` that differs and that both sides know."""
    return [f"{name}: {then[name]} -> {now[name]}" for name in then if name in now and then[name] != now[name]]


def check_same_prompts(then: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> None:
    """Raise :class:`ResumeError` where the continuation would draw the prompts in another order."""
    if wrong := changes({name: then[name] for name in DECIDES_PROMPTS if name in then}, now):
        raise ResumeError(
            f"the snapshot was made with other prompts ahead ({'; '.join(wrong)}): going on would use some prompts "
            "twice and others never. Resume with the old values, or begin anew from the weights with --finetune"
        )
