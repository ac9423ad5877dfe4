"""What a snapshot says of the run that made it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

_LIBRARIES = ("torch", "transformers", "numpy", "ray", "slime", "megatron-core", "sglang")
# Where things lie and how much is shown may differ between a run and its continuation.
WHERE_NOT_WHAT = frozenset(
    {"load", "save", "save_hf", "output_dir", "run_name", "ckpt_step", "override", "num_rollout", "sglang_router_ip",
     "sglang_router_port", "threads_per_process", "save_interval", "save_keep_last", "save_retain_interval",
     "phase_timeout"}
)  # fmt: skip


def library_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, as installed here; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes a run, of all its settings by name, as JSON gives it back."""
    kept = {name: value for name, value in values.items() if name not in WHERE_NOT_WHAT}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``name: old -> new`` for each of :func:`settings` that differs and that both sides know."""
    return [f"{name}: {then[name]} -> {now[name]}" for name in then if name in now and then[name] != now[name]]
