"""Checkpoints that have been compared with their model before.

The comparison of :func:`slime.models.loading.check_checkpoint` builds the model of transformers
without memory. The imports for this take seconds, at the start of every run. The result depends
only on config.json, generation_config.json, the headers of the tensors, whether the output layer is
the embedding, the releases of transformers and torch, and the code of this folder. It is therefore
stored in the user's
cache folder under a digest of these. A checkpoint that does not fit is compared again each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from slime.models.shards import (
    UNTIES,
    ModelError,
    TensorHeader,
    local_folder,
    own_head,
    read_headers,
)


def check_checkpoint_once(path: str, trust_remote_code: bool, by_transformers: bool) -> list[str]:
    """Do what :func:`slime.models.loading.check_checkpoint` does, unless such a checkpoint is known
    to fit its model.

    With ``trust_remote_code`` the model may be code of the checkpoint, so that nothing is stored.

    Returns:
        Notices, without their subject, which is the checkpoint.

    Raises:
        ModelError: As :func:`slime.models.loading.check_checkpoint`.
    """
    folder = local_folder(path)
    headers = read_headers(folder) if folder is not None else {}
    if folder is None or not headers or trust_remote_code or not (folder / "config.json").is_file():
        return compare_checkpoint(path, trust_remote_code, by_transformers)
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "slime"
        / "fitting-checkpoints"
    )
    file = cache / f"{_digest(folder, headers, by_transformers)}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or not written completely
        return [str(notice) for notice in json.loads(file.read_bytes())]
    notices = compare_checkpoint(path, trust_remote_code, by_transformers)
    if not any(str(folder) in notice for notice in notices):  # an equal checkpoint may be elsewhere
        # a home folder that cannot be written: compared again each time
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(notices), encoding="utf-8")
    return notices


def require_tied(notices: Iterable[str], who: str) -> None:
    """Refuse a checkpoint whose config.json wrongly ties its embeddings, for a program that
    believes it.

    Args:
        notices: Those about the checkpoint.

    Raises:
        ModelError: One of them says so.
    """
    for notice in notices:
        if notice.startswith(UNTIES):
            raise ModelError(f"{who} would ignore it. The checkpoint {notice}")


def compare_checkpoint(path: str, trust_remote_code: bool, by_transformers: bool) -> list[str]:
    """Compare the headers of a checkpoint with its model, and return what the user should know."""
    from slime.models.loading import check_checkpoint  # imports torch and transformers

    return check_checkpoint(path, trust_remote_code, by_transformers)


def _digest(folder: Path, headers: Mapping[str, TensorHeader], by_transformers: bool) -> str:
    digest = hashlib.sha256()
    for file in (folder / "config.json", folder / "generation_config.json"):
        digest.update(file.read_bytes() if file.is_file() else b"")
    releases = [version("transformers"), version("torch")]
    known = [sorted(headers.items()), own_head(folder, headers), by_transformers, releases]
    digest.update(json.dumps(known).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
