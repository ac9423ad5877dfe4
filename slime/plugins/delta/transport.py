"""Send only the changed bytes, through a folder that trainer and engines share.

The trainer keeps the last version in host memory and compares the new version with it. Each engine
keeps the last version too, and patches it (:mod:`slime.plugins.delta.loader`). An engine that does
not have the previous version (because it is new, missed a sync, or got damaged files) refuses the
delta, and gets the full version within the same pause.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket
from slime.engines.sglang_api import EngineError, EngineInfo
from slime.plugins.delta import LOADER
from slime.plugins.delta.delta import Changes, Encoding, HostCopy, digests
from slime.plugins.delta.published import Manifest, PublishedBucket, Status, reports_folder, request
from slime.weights.settings import Written
from slime.weights.transports.base import OpenWindow, SendResult, stream
from slime.weights.transports.disk import (
    copy_model_files,
    publishing,
    write_index,
    write_shard,
)
from slime.weights.update import DEFAULT_BUCKET_BYTES, WeightUpdate

_PACKERS = min(8, os.cpu_count() or 1)


class DeltaTransport:
    """Publishes ``delta_v<version>`` for engines that have the previous version,
    ``weight_v<version>`` for others.

    Args:
        folder, model, deadline, keep_files, written: See
            :class:`~slime.weights.transports.disk.DiskTransport`.
        encoding, checksum: ``--update-weight-delta-encoding`` and
            ``--update-weight-delta-checksum``.
    """

    name = "delta"
    bracketed = True
    bucket_bytes = DEFAULT_BUCKET_BYTES

    def __init__(
        self,
        folder: Path,
        model: Path,
        deadline: float,
        encoding: Encoding = "xor",
        checksum: str = "xxh3-128",
        keep_files: bool = False,
        written: Written | None = None,
    ) -> None:
        self.folder = folder
        self.model = model
        self.deadline = deadline
        self.keep_files = keep_files
        self.encoding = encoding
        self.checksum = checksum
        self.written = written
        self.copy = HostCopy()
        self._infos: dict[str, EngineInfo] = {}
        self._published: list[Path] = []

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        infos, failed = await on_each(
            engines, lambda engine: engine.info(), "report its version", self.deadline
        )
        for url, info in infos.items():
            loaders = info.extra.get("custom_weight_loader") or []
            if info.kind == "sglang" and LOADER not in loaders:
                reason = f"{url} runs without --custom-weight-loader {LOADER}, which deltas need"
                failed[url] = EngineError(reason)
        self._infos = infos
        return failed

    async def send(
        self,
        update: WeightUpdate,
        engines: Sequence[EngineHandle],
        open_window: OpenWindow | None = None,
    ) -> SendResult:
        result = SendResult()
        # All files are written while the engines still generate; the window opens after that.
        # Engines that have the base version load the delta, the others load the full version. An
        # engine that refuses the delta (because its copy has another version, or files are damaged)
        # gets the full version within the same window.
        base = self.copy.version if update.allow_delta else None
        current = {
            e.url for e in engines if base is not None and self._infos[e.url].weight_version == base
        }
        old = self._published
        self._published = []
        delta = await self._take_in(update, base if current else None, result)
        if delta is None:
            current = set()
        if len(current) < len(engines):
            await self._publish_full(update.version, result)
        for folder in self._published:
            await self._tell_written(folder, engines)
        ready = await open_window() if open_window is not None else engines
        behind = [engine for engine in ready if engine.url not in current]
        if delta is not None:
            failed = await self._load(delta, [engine for engine in ready if engine.url in current])
            refused = {url for url, error in failed.items() if isinstance(error, DeltaRefused)}
            behind += [engine for engine in ready if engine.url in refused]
            result.failed = {url: error for url, error in failed.items() if url not in refused}
        if behind:
            if self._published[-1] == delta:
                await self._publish_full(update.version, result)
                await self._tell_written(self._published[-1], behind)
            result.failed.update(await self._load(self._published[-1], behind))
        if not self.keep_files:
            await asyncio.to_thread(_remove, [path for path in old if path not in self._published])
        return result

    async def _tell_written(self, folder: Path, engines: Sequence[EngineHandle]) -> None:
        if self.written is not None:
            await asyncio.to_thread(self.written, folder, engines)

    async def close(self) -> None:
        """Remove the published files, unless files are kept. The copy in memory is not removed."""
        published = self._published
        self._published = []
        if not self.keep_files:
            await asyncio.to_thread(_remove, published)

    # --- on the trainer's side -----------------------------------------------------------------

    async def _take_in(
        self, update: WeightUpdate, base: str | None, result: SendResult
    ) -> Path | None:
        """Advance the copy to this version, and publish the delta. Return its folder, or None if
        there is no delta.
        """
        manifest = Manifest(update.version, base, self.encoding, self.checksum)
        path = self.folder / f"delta_v{update.version}"
        comparable = base is not None
        # until all buckets are stored, because the copy is a mix if gathering fails
        self.copy.version = None
        # Buckets are compared one after the other, because each replaces its part of the copy. They
        # are compressed in threads meanwhile.
        with ThreadPoolExecutor(_PACKERS, thread_name_prefix="weights-pack") as pool:
            async with publishing(self.folder, path.name) as aside:
                packing: list[Future[tuple[PublishedBucket, int]]] = []
                async for bucket in stream(update.buckets):
                    # buckets that wait for a packer occupy the trainer's memory
                    if len(packing) >= _PACKERS:
                        await asyncio.wrap_future(packing[-_PACKERS])
                    changes = await asyncio.to_thread(self.copy.advance, bucket, self.encoding)
                    comparable = comparable and changes is not None
                    packing.append(
                        pool.submit(
                            self._pack, aside, bucket.index, changes if comparable else None
                        )
                    )
                    result.tensors += len(bucket.tensors)
                del self.copy.buckets[len(packing) :]
                packed = [await asyncio.wrap_future(future) for future in packing]
                manifest.buckets = [bucket for bucket, _ in packed]
                manifest.write(aside)
        # The copy is whole again, whether or not a delta could be made.
        self.copy.version = update.version
        for held, described in zip(self.copy.buckets, manifest.buckets, strict=True):
            held.digests = described.digests
        if not comparable:
            await asyncio.to_thread(shutil.rmtree, path)
            return None
        self._published.append(path)
        total = sum(entry.nbytes for bucket in manifest.buckets for entry in bucket.entries)
        result.density = sum(bucket.changed for bucket in manifest.buckets) / max(total, 1)
        result.nbytes += sum(nbytes for _, nbytes in packed)
        return path

    def _pack(
        self, aside: Path, index: int, changes: Changes | None
    ) -> tuple[PublishedBucket, int]:
        """Write the changes of one bucket, and return its description and the size of the file."""
        ours = self.copy.buckets[index]
        described = PublishedBucket(
            None, ours.flat.numel(), ours.entries, digests(ours, self.checksum)
        )
        if changes is None or not changes.changed:
            return described, 0
        described.changed = changes.changed
        described.dense = changes.gaps is None
        described.file = f"bucket-{index:05d}.zst"
        data = changes.pack()
        (aside / described.file).write_bytes(data)
        return described, len(data)

    async def _publish_full(self, version: str, result: SendResult) -> None:
        """Publish the full version from the copy, as a Hugging Face folder with a manifest."""
        manifest = Manifest(version, None, self.encoding, self.checksum)
        nbytes = sum(entry.nbytes for held in self.copy.buckets for entry in held.entries)
        files: dict[str, str] = {}
        async with publishing(self.folder, f"weight_v{version}") as aside:
            await asyncio.to_thread(copy_model_files, self.model, aside)
            for index, held in enumerate(self.copy.buckets):
                shard = await asyncio.to_thread(write_shard, aside, Bucket(index, held.tensors()))
                files.update(shard)
                file = next(iter(shard.values()))
                manifest.buckets.append(
                    PublishedBucket(file, held.flat.numel(), held.entries, held.digests)
                )
            write_index(aside, files, nbytes)
            manifest.write(aside)
        self._published.append(self.folder / f"weight_v{version}")
        result.nbytes += nbytes

    # --- on the engines' side ------------------------------------------------------------------

    async def _load(self, folder: Path, engines: Sequence[EngineHandle]) -> Failures:
        """Let engines load a published version, and return those that failed, with their own error
        messages.
        """
        name = reports_folder()
        reports = folder.parent / name
        await asyncio.to_thread(reports.mkdir)
        numbers = {engine.url: i for i, engine in enumerate(engines)}

        async def load(engine: EngineHandle) -> None:
            number = numbers[engine.url]
            refusal = None
            ranks = self._infos[engine.url].tensor_parallel_size
            try:
                await engine.call_loader(
                    LOADER, request(folder, name, number, ranks, self.deadline)
                )
            # from the embedded engine; SGLang's response reports success in every case
            except EngineError as error:
                refusal = error
            reported = await asyncio.to_thread(Status.read, str(reports / str(number)))
            if refusal is not None and not reported:
                raise refusal
            _judge(engine.url, reported, ranks)

        try:
            _, failed = await on_each(engines, load, f"load {folder}", self.deadline)
        finally:
            await asyncio.to_thread(shutil.rmtree, reports, True)
        return failed


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


class DeltaRefused(EngineError):
    """The engine refused a version, but it is alive and can load a full version."""


def _judge(url: str, reports: Sequence[Status], ranks: int) -> None:
    """Check that every rank has loaded the version.

    Raises:
        DeltaRefused: A rank refused the version.
        EngineError: Some ranks did not report.
    """
    wrong = [report for report in reports if report.outcome != "loaded"]
    if wrong:
        raise DeltaRefused(f"{url} refused the weights ({wrong[0].outcome}): {wrong[0].message}")
    if len(reports) < ranks:
        raise EngineError(
            f"{url}: only {len(reports)} of {ranks} ranks reported; --update-weight-disk-dir must "
            "be visible to all"
        )
