"""The client of one inference engine: everything that the rest of slime may ask of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from slime.engines.http import HttpError, request, request_seconds
from slime.engines.sglang_api import (
    EMBEDDED,
    ApiVersion,
    Broadcast,
    Capabilities,
    EngineError,
    EngineInfo,
    MemoryTag,
    PauseMode,
    choose_api_version,
)  # fmt: skip

if TYPE_CHECKING:
    from slime.engines.flat import Bucket

logger = logging.getLogger(__name__)
CONTROL_SECONDS = 120.0
UPDATE_SECONDS = 600.0


class EngineHandle:
    """Speaks SGLang's native HTTP interface with one engine, the embedded one or SGLang itself.

    The engine is asked once what it is, at the first call that depends on it. A handle is used on one event loop
    (:mod:`slime.engines.background`). Every call has a deadline and raises :class:`EngineError` with the engine's own
    message; none waits for ever.

    Attributes:
        url: ``http://host:port``.
        capabilities: those of the newest API version until the engine was asked (:meth:`connect`, or any call).
    """

    def __init__(
        self, url: str, control_seconds: float = CONTROL_SECONDS, update_seconds: float = UPDATE_SECONDS
    ) -> None:
        self.url = url.rstrip("/")
        self.control_seconds = control_seconds
        self.update_seconds = update_seconds
        self._api: ApiVersion | None = None
        self._ranks = 1  # tensor parallel

    @property
    def capabilities(self) -> Capabilities:
        return (self._api or EMBEDDED).capabilities

    async def connect(self) -> ApiVersion:
        """Ask the engine which API version it speaks. It is asked once; later calls return the same answer."""
        if self._api is None:
            said = await self._get("/server_info")
            self._api, self._ranks = choose_api_version(said, self.url), int(said.get("tp_size", 1))
        return self._api

    async def _call(self, method: str, path: str, body: object = None, seconds: float | None = None) -> Any:
        """One request. It is sent a second time where the server closed a pooled connection before it answered: the
        server may have closed an idle connection just when it was used again."""
        for again in (True, False):
            try:
                return await request(method, self.url + path, body, seconds or self.control_seconds)
            except HttpError as error:
                if not (again and error.disconnected):
                    raise EngineError(str(error)) from error
        raise AssertionError("unreachable")

    async def _get(self, path: str) -> Any:
        return await self._call("GET", path)

    async def _post(
        self, path: str, body: Mapping[str, object] | bytes | None = None, seconds: float | None = None
    ) -> Any:
        return await self._call("POST", path, body or {}, seconds)

    # --- generation ----------------------------------------------------------------------------

    async def generate(self, request: Mapping[str, object]) -> Any:
        """POST /generate. Returns the decoded answer: a dict, or a list for a batch."""
        return await self._post("/generate", request, request_seconds())

    async def health(self, timeout: float = 30.0) -> bool:
        """True when the engine produced a token within ``timeout`` seconds."""
        try:
            await self._call("GET", "/health_generate", seconds=timeout)
        except EngineError:
            return False
        return True

    async def info(self) -> EngineInfo:
        api = await self.connect()
        said, model = await self._get("/server_info"), await self._get("/model_info")
        return EngineInfo(
            kind=api.kind,
            version=str(said["version"]),
            model_path=str(model["model_path"]),
            weight_version=str(model["weight_version"]),
            dtype=str(said.get("dtype", "")),
            tensor_parallel_size=int(said.get("tp_size", 1)),
            extra=said,
        )

    async def load(self) -> dict[str, int]:
        """``running``, ``waiting`` (requests) and ``tokens`` (in the KV cache)."""
        ranks = (await self._get("/v1/loads"))["loads"]
        fields = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "tokens": "num_used_tokens"}
        return {name: sum(int(rank.get(field) or 0) for rank in ranks) for name, field in fields.items()}

    async def abort(self, request_id: str | None = None) -> None:
        """End one request, or all when ``request_id`` is None; their answers hold the tokens so far."""
        await self._post("/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def pause(self, mode: PauseMode) -> None:
        if mode == "retract" and not (await self.connect()).capabilities.retract:
            raise EngineError(f"{self.url} cannot update weights in pause mode retract; use abort or in_place")
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self._post("/continue_generation")

    async def flush_cache(self) -> None:
        await self._post("/flush_cache")

    # --- weights -------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Open a weight update; a no-op where the engine knows no brackets.

        An external engine outlives its run. If a trainer died in the middle of an update, that update is still open
        and the engine generates nothing: it is closed first. The weights are then a mix of two versions, but a run that
        starts sends every tensor in its first update.
        """
        if not (await self.connect()).capabilities.update_brackets:
            return
        try:
            await self._post("/begin_weight_update")
        except EngineError as error:
            if "already" not in str(error):
                raise
            logger.warning("%s: a trainer that died left a weight update open, which is closed now", self.url)
            await self._post("/end_weight_update", seconds=self.update_seconds)
            await self._post("/begin_weight_update")

    async def push(self, bucket: Bucket, weight_version: str, others: Sequence[str] = ()) -> None:
        """Hand over one bucket by shared memory (CPU) or IPC handle (CUDA); same host only.

        ``others``: what training ranks on the engine's other GPUs offer, see
        :func:`slime.engines.tensor_payload.payload`."""
        from slime.engines.tensor_payload import handles, payload

        embedded = (await self.connect()).kind == "embedded"
        tensors = handles(bucket) if embedded else payload(bucket, self._ranks, others)
        body = {**tensors, "flush_cache": False, "weight_version": weight_version}
        await self._post("/update_weights_from_tensor", body, self.update_seconds)

    async def end_update(self, weight_version: str) -> None:
        """Close the update: from here on answers carry ``weight_version``."""
        await self._post("/update_weight_version", {"new_version": weight_version, "abort_all_requests": False})
        if (await self.connect()).capabilities.update_brackets:
            await self._post("/end_weight_update", seconds=self.update_seconds)

    async def init_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group with the trainer; rank 0 is the sender."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, self.update_seconds)

    async def receive(self, broadcast: Broadcast) -> None:
        """Take part in the broadcast of one bucket, and load it."""
        await self._post("/update_weights_from_distributed", broadcast.body, self.update_seconds)

    async def destroy_group(self, group_name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def load_from_disk(self, path: str, weight_version: str) -> None:
        # Not the format that the server was started with, which need not be one of files.
        body = {"model_path": path, "load_format": "auto", "weight_version": weight_version, "flush_cache": False}
        await self._post("/update_weights_from_disk", body, self.update_seconds)

    async def call_loader(self, loader: str, request: str) -> None:
        """Let the engine call ``loader(model, [(request, empty tensor)])``, an import path that it was started
        with as ``--custom-weight-loader``; within an update. The version keeps its name until the update ends."""
        import base64
        import pickle

        import torch

        body: dict[str, object] = {"load_format": loader, "flush_cache": False}
        if (await self.connect()).kind == "embedded":
            body["loader_request"] = request
        else:
            entry = base64.b64encode(pickle.dumps([(request, torch.empty(0))])).decode()
            body["serialized_named_tensors"] = [entry] * self._ranks
        await self._post("/update_weights_from_tensor", body, self.update_seconds)

    async def checksum(self) -> dict[str, str]:
        """Digest per tensor, by the names that the engine uses (see ``named_checksums``)."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, self.update_seconds)
        ranks = answer["ranks"]
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {f"rank{i}.{name}": value for i, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    async def check_weights(self, action: Literal["snapshot", "reset_tensors", "compare"]) -> None:
        """POST /weights_checker: keep a copy of all tensors, overwrite them, or compare them with the copy.
        A difference is an :class:`EngineError` that carries the engine's message."""
        if action != "reset_tensors" and not (await self.connect()).capabilities.weight_comparison:
            raise EngineError(f"{self.url} cannot compare its weights, because SGLang supports this only on CUDA")
        await self._post("/weights_checker", {"action": action}, self.update_seconds)

    # --- memory --------------------------------------------------------------------------------

    async def release(self, tags: Sequence[MemoryTag] = ()) -> None:
        """Give accelerator memory back; no tags means all."""
        await self._post("/release_memory_occupation", {"tags": list(tags) or None})

    async def resume(self, tags: Sequence[MemoryTag] = ()) -> None:
        await self._post("/resume_memory_occupation", {"tags": list(tags) or None})
