"""The manifest of a snapshot: facts about the run that wrote it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from typing import NotRequired, TypedDict

from slime.checkpoint.files import FileEntry
from slime.types import JsonObject, JsonValue

_LIBRARIES = ("torch", "transformers", "numpy", "ray", "slime-rl", "megatron-core", "sglang")
# Settings of locations, limits and output, which may differ between a run and its continuation.
WHERE_NOT_WHAT = frozenset(
    {"load", "save", "save_hf", "save_hf_dtype", "output_dir", "run_name", "ckpt_step", "override",
     "sglang_router_ip", "sglang_router_port", "threads_per_process", "save_interval", "save_keep_last",
     "save_retain_interval", "phase_timeout", "replay_schedule", "max_restarts"}
)  # fmt: skip

# If one of these changed, the rest of the epoch would repeat some prompts and skip others.
DECIDES_PROMPTS = ("rollout_seed", "rollout_shuffle")

# They decide which weights generate a rollout, and which copies of weights --keep-old-actor keeps.
DECIDES_OLD_ACTOR = (
    "keep_old_actor",
    "async_buffer_size",
    "update_weights_interval",
    "max_weight_staleness",
)


class RunFacts(TypedDict, total=False):
    """The facts that are the same in all snapshots of one process."""

    attempt: int
    """How often the run was resumed before."""
    world_size: int
    seed: int
    settings: JsonObject
    """See :func:`settings`."""


class OldActorFacts(TypedDict):
    """What the copies of the weights held that ``--keep-old-actor`` keeps
    (:class:`slime.cluster.trainer.OldActor`).
    """

    held: int
    """The number of steps that had trained the weights that the engines had."""
    lag: int
    ahead: int
    """The number of rollouts generated ahead that the snapshot holds."""


class Facts(RunFacts):
    """The facts that the run provides for one snapshot."""

    rollout_id: int
    """The last trained rollout."""
    ahead: NotRequired[int]
    """The number of rollouts generated ahead that the snapshot holds."""
    weight_version: NotRequired[str]
    old_actor: NotRequired[OldActorFacts]
    metrics: NotRequired[dict[str, float]]
    """The metrics of the step that were known when the snapshot was written."""


class Manifest(Facts):
    """The file ``manifest.json`` of a snapshot."""

    format: int
    sequence: int
    """Number of the snapshot in its folder, in the order of commits."""
    time: str
    libraries: dict[str, str]
    files: list[FileEntry]


class ResumeError(ValueError):
    """The run cannot resume from this snapshot with these settings. The message says which to
    change.
    """


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries on which results depend, without importing
    them.
    """
    # Importing torch or SGLang for their versions would take seconds.
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def settings(values: Mapping[str, object]) -> JsonObject:
    """Return the settings that influence the results of a run, converted to JSON values and
    back.
    """
    # The folder of a program's rows and functions has another name in each run.
    kept = {
        name: value
        for name, value in values.items()
        if name not in WHERE_NOT_WHAT and "/slime-inputs-" not in str(value)
    }
    # Through JSON and back, so that tuples and paths compare equal to what a manifest holds.
    plain: JsonObject = json.loads(json.dumps(kept, default=str))
    return plain


def changes(
    then: Mapping[str, JsonValue], now: Mapping[str, JsonValue], names: Iterable[str] = ()
) -> list[str]:
    """Return ``name: old -> new`` for each of the :func:`settings` that both sides have and that
    differs; ``names`` are those to compare, by default all.
    """
    return [
        f"{name}: {then[name]} -> {now[name]}"
        for name in names or then
        if name in then and name in now and then[name] != now[name]
    ]


def check_same_prompts(then: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> None:
    """Raise :class:`ResumeError` if the continuation would use the prompts in another order."""
    if wrong := changes(then, now, DECIDES_PROMPTS):
        raise ResumeError(
            "settings that decide the order of prompts differ from the snapshot's "
            f"({'; '.join(wrong)}): some prompts would be used twice and others never. Resume "
            "with the old values, or start from its weights (--finetune)"
        )


def check_same_old_actor(
    manifest: Manifest, now: Mapping[str, JsonValue], asynchronous: bool
) -> None:
    """Raise :class:`ResumeError` if ``--keep-old-actor`` has no copy of the weights that generated
    a rollout.

    A snapshot of the asynchronous loop holds rollouts that were generated ahead. Which copy of the
    weights belongs to which of them depends on the settings.

    Args:
        now: The current values of :data:`DECIDES_OLD_ACTOR`.
        asynchronous: Whether ``train_async.py`` resumes the run.
    """
    ahead = manifest.get("ahead") or manifest.get("old_actor", {}).get("ahead", 0)
    then = manifest.get("settings", {})
    # Older snapshots do not record all of these settings; those that are absent cannot be compared.
    wrong = changes(then, now, DECIDES_OLD_ACTOR)
    wrong += [] if asynchronous else ["train.py instead of train_async.py"]
    if now["keep_old_actor"] and ahead and wrong:
        raise ResumeError(
            f"--keep-old-actor: the snapshot holds {ahead} rollout(s) generated ahead, and what "
            f"differs now ({'; '.join(wrong)}) decides with which weights their old log-probs are "
            "computed. Resume with the old values, or start from its weights (--finetune)"
        )
