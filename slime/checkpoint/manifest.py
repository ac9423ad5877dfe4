"""What a snapshot says of the run that made it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

_LIBRARIES = ("torch", "transformers", "numpy", "ray", "slime", "megatron-core", "sglang")
# Where things lie and how much is shown may differ between a run and its continuation.
WHERE_NOT_WHAT = frozenset(
    {"load", "save", "save_hf", "output_dir", "run_name", "ckpt_step", "override", "num_rollout", "sglang_router_ip",
     "sglang_router_port", "threads_per_process"}
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


def args_digest(args: Mapping[str, Any], ignore: Iterable[str] = WHERE_NOT_WHAT) -> str:
    """XXH3-128 of the settings that shape a run, in one canonical order.

    Args:
        args: ``vars(args)``. Values that JSON does not know count by their ``str``.
        ignore: names that may differ between a run and its continuation.
    """
    skip = set(ignore)
    kept = {name: value for name, value in args.items() if name not in skip and not name.startswith("_")}
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True, default=str).encode())
