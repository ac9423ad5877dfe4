"""The client of one inference engine, with all calls of the rest of slime, and the same call on
several engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slime.engines.http import HttpError, request, request_seconds, retrying
from slime.engines.keys import ServerKeys, send_key
from slime.engines.local import is_local
from slime.engines.payload import AdapterPayload, AdapterRequest, handles, payload, sglang_config
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
)

if TYPE_CHECKING:
    from slime.engines.payload import Bucket


logger = logging.getLogger(__name__)
CONTROL_SECONDS = 120.0
LIST_SECONDS = 10.0
UPDATE_SECONDS = 600.0


class EngineHandle:
    """A client for SGLang's native HTTP interface, as the embedded engine and SGLang serve it.

    The handle requests the engine's version once, at the first call that depends on it. A handle
    must be used on one event loop only (:mod:`slime.engines.background`). Every call has a
    deadline. If a call fails or its deadline passes, it raises :class:`EngineError` with the
    message of the engine.

    Args:
        keys: The keys of the engine, if this process does not know them yet
            (:mod:`slime.engines.keys`).

    Attributes:
        url: The address of the engine, ``http://host:port``.
        capabilities: What the engine supports. Before the engine's version is known (see
            :meth:`connect`), these are the capabilities of the newest API version.
    """

    def __init__(
        self,
        url: str,
        control_seconds: float = CONTROL_SECONDS,
        update_seconds: float = UPDATE_SECONDS,
        keys: ServerKeys | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        if keys is not None:
            send_key(self.url, keys)
        self.control_seconds = control_seconds
        self.update_seconds = update_seconds
        self._api: ApiVersion | None = None
        self._ranks = 1  # tensor-parallel ranks of the engine

    @property
    def capabilities(self) -> Capabilities:
        return (self._api or EMBEDDED).capabilities

    async def connect(self) -> ApiVersion:
        """Return the API version of the engine. Only the first call sends a request; later calls
        use its result.
        """
        if self._api is None:
            await self._server_info()
        assert self._api is not None
        return self._api

    async def _server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._get("/server_info")
        if self._api is None:
            self._api = choose_api_version(info, self.url)
            self._ranks = int(info.get("tp_size", 1))
        return info

    async def _call(
        self, method: str, path: str, body: object = None, seconds: float | None = None
    ) -> Any:
        """Send one request, and once more if the server closed the connection before it answered.

        The server may close an idle connection of the pool at the moment when the client uses it
        again.
        """
        for again in (True, False):
            try:
                return await request(method, self.url + path, body, seconds or self.control_seconds)
            except HttpError as error:
                if not (again and error.disconnected):
                    raise EngineError(str(error)) from error
        raise AssertionError("unreachable")

    async def _get(self, path: str) -> Any:
        answer = await self._call("GET", path)
        if not isinstance(answer, dict):
            raise EngineError(
                f"{self.url}{path} answered 200, but not with a JSON object: {str(answer)[:200]!r}"
            )
        return answer

    async def _post(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        seconds: float | None = None,
    ) -> Any:
        return await self._call("POST", path, body or {}, seconds)

    # --- generation ----------------------------------------------------------------------------

    async def generate(self, request: Mapping[str, object]) -> Any:
        """POST /generate, and return the decoded response: a dict, or a list for a batch."""
        return await self._post("/generate", request, request_seconds())

    async def health(self, timeout: float = 30.0) -> bool:
        """Return whether the engine produced a token within ``timeout`` seconds."""
        try:
            await self._call("GET", "/health_generate", seconds=timeout)
        except EngineError:
            return False
        return True

    async def info(self) -> EngineInfo:
        server, model = await asyncio.gather(self._server_info(), self._get("/model_info"))
        api = await self.connect()
        return EngineInfo(
            kind=api.kind,
            version=str(server["version"]),
            model_path=str(model["model_path"]),
            weight_version=str(model["weight_version"]),
            dtype=str(server.get("dtype", "")),
            tensor_parallel_size=int(server.get("tp_size", 1)),
            extra=server,
        )

    async def load(self) -> dict[str, int]:
        """Return the number of ``running`` and ``waiting`` requests and of ``tokens`` in the KV
        cache.
        """
        ranks = (await self._get("/v1/loads"))["loads"]
        fields = {
            "running": "num_running_reqs",
            "waiting": "num_waiting_reqs",
            "tokens": "num_used_tokens",
        }
        return {
            name: sum(int(rank.get(field) or 0) for rank in ranks) for name, field in fields.items()
        }

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all if ``request_id`` is None. Their responses hold the tokens
        generated so far.
        """
        await self._post(
            "/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id}
        )

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self, empty_device_cache: bool = True) -> None:
        """Continue to generate.

        Args:
            empty_device_cache: Whether SGLang first returns the device memory that torch holds
                without need.
        """
        await self._post(
            "/continue_generation", {} if empty_device_cache else {"torch_empty_cache": False}
        )

    async def flush_cache(self) -> None:
        await self._post("/flush_cache")

    # --- weights -------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Open a weight update. This does nothing if the engine has no calls to begin and end an
        update.

        An external engine outlives its run. If a trainer died in the middle of an update, that
        update is still open and the engine generates nothing. Such an update is closed first. The
        weights are then a mix of two versions, but this does no harm, because a run sends every
        tensor in its first update.
        """
        if not (await self.connect()).capabilities.update_brackets:
            return
        try:
            await self._post("/begin_weight_update")
        except EngineError as error:
            if "already" not in str(error):
                raise
            logger.warning(
                "%s: a trainer that died left a weight update open, which is closed now", self.url
            )
            await self._post("/end_weight_update", seconds=self.update_seconds)
            await self._post("/begin_weight_update")

    async def set_adapter_layers(self, config: Mapping[str, object]) -> None:
        """Give layers an adapter (LoRA) within an open update; nothing changes if they have it
        already.

        Args:
            config: The content of PEFT's ``adapter_config.json``, with the whole names of the
                layers.
        """
        if not (await self.connect()).capabilities.adapters:
            raise EngineError(
                f"{self.url} cannot be updated with an adapter: use --lora-sync merged"
            )
        await self._post("/set_lora_layers", {"config_dict": dict(config)}, self.update_seconds)

    async def adapter_request(
        self, name: str, config: Mapping[str, object], source: Path | AdapterPayload
    ) -> AdapterRequest:
        """Return the request with which :meth:`load_adapter` loads an adapter (LoRA), encoded.

        It can be made while the engine generates. It must be sent to this engine only, and once.

        Args:
            name: The name of the adapter.
            config: The content of PEFT's ``adapter_config.json``.
            source: The factors, or a folder with PEFT's files.

        Raises:
            EngineError: The engine was started without ``--enable-lora``, or it opens the factors
                in shared memory and is on another host.
        """
        import orjson

        api = await self.connect()
        if not api.capabilities.named_adapters:
            raise EngineError(
                f"{self.url} cannot load adapters: start it with --enable-lora, --max-lora-rank "
                "and --lora-target-modules, or use --lora-sync merged"
            )
        if not isinstance(source, AdapterPayload):
            body: dict[str, object] = {"lora_name": name, "lora_path": str(source)}
            return AdapterRequest(name, "/load_lora_adapter", orjson.dumps(body))
        if api.capabilities.plain_handles:
            if not source.shared and not is_local(self.url):
                raise EngineError(
                    f"{self.url} is on another host, and takes adapters from files or shared "
                    "memory: use --update-weight-transport disk, or --lora-sync merged"
                )
            body = {"config_dict": dict(config), **handles(source.bucket, is_local(self.url))}
        else:
            tensors = source.body(self._ranks, newest=api.capabilities.adapter_digests)
            body = {"config_dict": sglang_config(config), **tensors}
        body["lora_name"] = name
        return AdapterRequest(name, "/load_lora_adapter_from_tensors", orjson.dumps(body))

    async def load_adapter(self, request: AdapterRequest) -> None:
        """Load an adapter (LoRA) under its name, in place of the one that has this name.

        The engine must be paused and have no requests of the old one, since SGLang unloads an
        adapter only when the last of its requests has ended.

        Raises:
            EngineError: The engine refuses the adapter.
        """
        await self.unload_adapter(request.name)
        await self._post(request.path, request.body, self.update_seconds)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter when the last of its requests has ended. Nothing happens if there is
        none of this name.
        """
        try:
            await self._post("/unload_lora_adapter", {"lora_name": name}, self.update_seconds)
        except EngineError as error:
            if "does not exist" not in str(error):
                raise

    async def push(self, bucket: Bucket, weight_version: str, others: Sequence[str] = ()) -> None:
        """Send one bucket to an engine on the same host, by shared memory (CPU) or an IPC handle
        (CUDA).

        Args:
            others: The entries of the training ranks on the engine's other GPUs; see
                :func:`slime.engines.payload.payload`.
        """
        plain = (await self.connect()).capabilities.plain_handles
        tensors = (
            handles(bucket, is_local(self.url)) if plain else payload(bucket, self._ranks, others)
        )
        body = {**tensors, "flush_cache": False, "weight_version": weight_version}
        await self._post("/update_weights_from_tensor", body, self.update_seconds)

    async def end_update(self, weight_version: str) -> None:
        """Close the update. From then on, responses carry ``weight_version``."""
        # The version is set before the update ends, because the engine generates again as soon as
        # it ends.
        await self.name_version(weight_version)
        if (await self.connect()).capabilities.update_brackets:
            await self._post("/end_weight_update", seconds=self.update_seconds)

    async def name_version(self, weight_version: str) -> None:
        """Let responses carry ``weight_version`` from now on."""
        await self._post(
            "/update_weight_version", {"new_version": weight_version, "abort_all_requests": False}
        )

    async def init_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Let the engine join a process group with the trainer, in which rank 0 is the sender."""
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
        """Let the engine take part in the broadcast of one bucket and load the tensors."""
        await self._post("/update_weights_from_distributed", broadcast.body, self.update_seconds)

    async def destroy_group(self, group_name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def load_from_disk(self, path: str, weight_version: str) -> None:
        # Without load_format, SGLang uses the format that it was started with, which may not be a
        # format of files.
        body = {
            "model_path": path,
            "load_format": "auto",
            "weight_version": weight_version,
            "flush_cache": False,
        }
        await self._post("/update_weights_from_disk", body, self.update_seconds)

    async def call_loader(self, loader: str, request: str) -> None:
        """Let the engine call ``loader(model, [(request, empty tensor)])`` within an open update.

        The weight version does not change until the update ends.

        Args:
            loader: An import path that the engine was started with (``--custom-weight-loader``).
        """
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
        """Return the digest of each tensor, by the names that the engine uses (see
        ``named_checksums``).
        """
        answer = await self._post("/weights_checker", {"action": "checksum"}, self.update_seconds)
        ranks = answer["ranks"]
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {
            f"rank{i}.{name}": value
            for i, rank in enumerate(ranks)
            for name, value in rank["checksums"].items()
        }

    async def check_weights(self, action: Literal["snapshot", "reset_tensors", "compare"]) -> None:
        """Keep a copy of all tensors, overwrite them, or compare them with the copy (POST
        /weights_checker).

        Raises:
            EngineError: The comparison found a difference, or the engine cannot compare.
        """
        if action != "reset_tensors" and not (await self.connect()).capabilities.weight_comparison:
            raise EngineError(
                f"{self.url} cannot compare its weights, because SGLang supports this only on CUDA"
            )
        await self._post("/weights_checker", {"action": action}, self.update_seconds)

    # --- memory --------------------------------------------------------------------------------

    async def release(self, tags: Sequence[MemoryTag] = ()) -> None:
        """Release accelerator memory: that of ``tags``, or all memory if there are no tags."""
        # The first one pins host memory for all weights if SGLang keeps a copy of them
        # (enable_weights_cpu_backup).
        await self._post(
            "/release_memory_occupation", {"tags": list(tags) or None}, self.update_seconds
        )

    async def resume(self, tags: Sequence[MemoryTag] = ()) -> None:
        await self._post(
            "/resume_memory_occupation", {"tags": list(tags) or None}, self.update_seconds
        )


# Make the same call on several engines concurrently, and collect the failures.


T = TypeVar("T")
Failures = dict[str, Exception]
"""The error of each failed engine, by engine URL."""


async def on_each(
    engines: Sequence[EngineHandle],
    call: Callable[[EngineHandle], Awaitable[T]],
    what: str,
    deadline: float,
) -> tuple[dict[str, T], Failures]:
    """Await ``call`` for all engines concurrently, and return the results and the failures by URL.

    An engine that does not answer within ``deadline`` seconds counts as failed. Only
    :class:`EngineError`, :class:`OSError` and :class:`TimeoutError` count as failures of an engine;
    any other error propagates.
    """
    # With return_exceptions all calls run to their end: one failed engine does not cancel the calls
    # to the others.
    outcomes = await asyncio.gather(
        *(_limited(engine, call, what, deadline) for engine in engines), return_exceptions=True
    )
    done: dict[str, T] = {}
    failed: Failures = {}
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, EngineError | OSError):
            failed[engine.url] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            done[engine.url] = outcome
    return done, failed


async def _limited(
    engine: EngineHandle, call: Callable[[EngineHandle], Awaitable[T]], what: str, deadline: float
) -> T:
    try:
        async with asyncio.timeout(deadline):
            return await call(engine)
    except TimeoutError as error:
        raise EngineError(f"{engine.url} did not {what} within {deadline:.0f} s") from error


async def worker_urls(base: str) -> list[str]:
    """Return the URLs of all engines behind the router at ``base``.

    Without a router the address is that of the only engine, which has no ``/workers``; the list is
    then this address.
    """
    from slime.engines.router import engine_url

    base = base.rstrip("/")
    try:
        listed = await retrying(lambda: request("GET", f"{base}/workers", None, LIST_SECONDS), 3)
    except HttpError as error:
        if error.status in (404, 405):
            return [base]
        raise
    urls = [
        worker["url"] if isinstance(worker, dict) else worker
        for worker in listed.get("workers", [])
    ]
    return list(dict.fromkeys(map(engine_url, urls))) or [base]
