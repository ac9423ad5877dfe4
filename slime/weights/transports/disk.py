"""Send weights through a folder that trainer and engines share: one complete Hugging Face model per
version.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from slime.data.plain_values import sync_path
from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket
from slime.models.fp8 import name_quantization
from slime.models.fp8_format import Fp8Layout
from slime.models.shards import ModelError, copy_side_files, read_headers, shorten
from slime.weights.settings import WeightSyncSettings, Written
from slime.weights.transports.base import OpenWindow, SendResult, stream
from slime.weights.update import DEFAULT_BUCKET_BYTES, WeightUpdate

LOCK = ".slime.lock"
LEAVE_SECONDS = 30.0
"""How long a trainer waits for the lock, which the one before it loses when its process has
ended.
"""
_claimed: dict[Path, TextIO] = {}  # the open locks of this process, by folder


@dataclass
class NewestVersion:
    """The folder of the version that was written last; those before it are removed unless files are
    kept.
    """

    keep_files: bool
    path: Path | None = None

    async def becomes(self, path: Path | None) -> None:
        # The path is the same as before if a version is sent again.
        if self.path not in (None, path) and not self.keep_files:
            await asyncio.to_thread(shutil.rmtree, self.path, True)
        self.path = path


class DiskTransport:
    """Writes ``<folder>/weight_v<version>`` under a temporary name, syncs and renames it, and lets
    the engines load it.

    Engines are paused only while they load.

    Args:
        folder: A folder with the same path on trainer and engines (``--update-weight-disk-dir``).
        model: The Hugging Face folder whose configuration and tokenizer files are copied to each
            version.
        deadline: The time limit in seconds for loading a version.
        keep_files: Whether to keep every version. Otherwise a version is removed after the next one
            was loaded.
        layout: The weights that are sent as 8-bit floats; None if none are.
        dtype: With ``layout``, the dtype to which engines that dequantize do so.
        written: Called with the folder of each version and the engines, before the engines load it
            (``--custom-update-weight-post-write-path``).
    """

    name = "disk"
    bracketed = False
    bucket_bytes = DEFAULT_BUCKET_BYTES

    def __init__(
        self,
        folder: Path,
        model: Path,
        deadline: float,
        keep_files: bool = False,
        written: Written | None = None,
        layout: Fp8Layout | None = None,
        dtype: str | None = None,
    ) -> None:
        self.folder = folder
        self.model = model
        self.deadline = deadline
        self.written = written
        self.layout = layout
        self.dtype = dtype
        self._newest = NewestVersion(keep_files)

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        return {}

    async def send(
        self,
        update: WeightUpdate,
        engines: Sequence[EngineHandle],
        open_window: OpenWindow | None = None,
    ) -> SendResult:
        result = SendResult()
        path, names = await self._write(update, result)
        if self.written is not None:
            await asyncio.to_thread(self.written, path, engines)
        await asyncio.to_thread(require_whole, path, names)
        ready = await open_window() if open_window is not None else engines
        what = f"load {path}"
        _, result.failed = await on_each(
            ready,
            lambda engine: engine.load_from_disk(str(path), update.version),
            what,
            self.deadline,
        )
        await self._newest.becomes(path)
        return result

    async def close(self) -> None:
        """Remove the last version, unless files are kept."""
        await self._newest.becomes(None)

    async def _write(self, update: WeightUpdate, result: SendResult) -> tuple[Path, Set[str]]:
        name = f"weight_v{update.version}"
        async with publishing(self.folder, name) as aside:
            await asyncio.to_thread(copy_model_files, self.model, aside)
            if self.layout is not None:
                name_quantization(
                    self.model / "config.json", aside / "config.json", self.layout, self.dtype
                )
            files: dict[str, str] = {}
            async for bucket in stream(update.buckets):
                result.count(bucket)
                files.update(await asyncio.to_thread(write_shard, aside, bucket))
            write_index(aside, files, result.nbytes)
        return self.folder / name, files.keys()


def require_whole(folder: Path, names: Set[str]) -> None:
    """Check that the files of a version have all its tensors, before an engine reads any of them.

    An engine may write some tensors before it finds a damaged file (SGLang reads the files one
    after the other, and keeps its old values of tensors that no file has). So what a full disk or a
    hook has damaged is found here.

    Raises:
        ModelError: A file is missing, damaged or truncated, or tensors are missing. The message
            names them.
    """
    lost = sorted(names - read_headers(folder).keys())
    if lost:
        raise ModelError(
            f"{folder} lacks {len(lost)} of the tensors that were written to it: {shorten(lost)}"
        )


def copy_model_files(model: Path, folder: Path) -> None:
    """Copy all files except weights: configuration, tokenizer, chat template, remote code."""
    copy_side_files(model, folder)
    shutil.copy2(model / "config.json", folder / "config.json")


def write_shard(folder: Path, bucket: Bucket) -> dict[str, str]:
    """Write a bucket as one safetensors file, and return the name of the file for each tensor."""
    from safetensors.torch import save_file

    name = f"model-{bucket.index + 1:05d}.safetensors"
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in bucket.tensors}
    starts = [tensor.data_ptr() for tensor in tensors.values()]
    # tied weights with two names; safetensors refuses tensors that share memory
    if len(set(starts)) < len(starts):
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(tensors, name)


def write_index(folder: Path, files: dict[str, str], nbytes: int) -> None:
    """Write the index, which names the file of each tensor."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def claimed_folder(settings: WeightSyncSettings) -> tuple[Path, Path]:
    """Claim the folder of ``--update-weight-disk-dir`` for this run, and return it and the local
    folder of the model.

    Raises:
        ValueError: There is no folder, or another run uses it.
    """
    if not settings.disk_dir:
        raise ValueError(
            "--update-weight-transport disk needs --update-weight-disk-dir: a folder that "
            "trainer and engines share"
        )
    model = Path(settings.model).expanduser()
    if not model.is_dir():
        from huggingface_hub import snapshot_download

        model = Path(snapshot_download(settings.model, local_files_only=True))
    folder = Path(settings.disk_dir)
    claim(folder)
    return folder, model


def claim(folder: Path) -> None:
    """Reserve a folder for the versions of this process, until it ends, and remove what a killed
    trainer has left.

    The versions of two runs have the same names, so each would replace files that engines of the
    other are to load.

    Raises:
        ValueError: Another process has reserved the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    if place in _claimed:
        return
    # The lock ends with this process, however it ends. A trainer that is started again may come
    # before the end of the one that it replaces, so it waits for a while.
    file = open(folder / LOCK, "a")  # noqa: SIM115
    last = time.monotonic() + LEAVE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > last:
                file.close()
                raise ValueError(
                    f"--update-weight-disk-dir {folder} is used by another run, which would "
                    "replace these weights by its own: give each run a folder of its own"
                ) from None
            time.sleep(0.1)
        except OSError:  # this file system has no locks
            file.close()
            return
    _claimed[place] = file
    # Nobody else writes here now, so temporary folders of versions belong to a trainer that was
    # killed.
    for kind in ("weight_v", "delta_v", "adapter_v"):
        for unfinished in folder.glob(f".{kind}*.tmp-*"):
            shutil.rmtree(unfinished, ignore_errors=True)


@asynccontextmanager
async def publishing(folder: Path, name: str) -> AsyncIterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder/name`` at the end, so that readers see
    all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    aside.mkdir()
    try:
        yield aside
        await asyncio.to_thread(_publish, aside, folder / name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _publish(aside: Path, final: Path) -> None:
    # The files and their folder are synced to disk before the folder is renamed. So after a crash
    # of the machine, a reader finds either the complete version or none.
    for path in [*aside.iterdir(), aside]:
        sync_path(path)
    if final.exists():  # the same version is sent again after a sync that failed
        shutil.rmtree(final)
    os.replace(aside, final)
    sync_path(final.parent)
