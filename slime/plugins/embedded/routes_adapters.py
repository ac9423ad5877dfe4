"""Routes that load and unload adapters, with SGLang's names: requests choose one of them by ``lora_path``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from slime.models.lora import LoraSettings
from slime.models.peft_files import Factors, factors_of, read_config, read_factors
from slime.models.shards import ModelError
from slime.plugins.embedded import adapters
from slime.plugins.embedded.fields import json_object, need, text
from slime.plugins.embedded.loading import Loaded
from slime.plugins.embedded.tensor_wire import read_tensors
from slime.plugins.embedded.web import LOADED, body_of, outcome
from slime.plugins.embedded.weights import WeightError

routes = web.RouteTableDef()
_NAME = text(4096)


@routes.post("/load_lora_adapter")
async def load_lora_adapter(request: web.Request) -> web.Response:
    """Load PEFT's files from the folder ``lora_path`` under the name ``lora_name``."""
    body = await body_of(request)
    name, folder = need(body, "lora_name", _NAME), Path(need(body, "lora_path", _NAME)).expanduser()

    def read() -> tuple[LoraSettings, dict[str, Factors]]:
        settings, _ = read_config(folder)
        return settings, read_factors(folder, settings.rank)

    try:
        settings, factors = await asyncio.to_thread(read)
    except ModelError as error:
        return outcome(False, str(error))
    return await _load(request, name, settings, factors)


@routes.post("/load_lora_adapter_from_tensors")
async def load_lora_adapter_from_tensors(request: web.Request) -> web.Response:
    """Load factors from handles (see :mod:`slime.engines.tensor_payload`) under the name ``lora_name``."""
    body = await body_of(request)
    name = need(body, "lora_name", _NAME)
    settings, _ = adapters.read_settings(need(body, "config_dict", json_object))
    try:
        factors = factors_of(dict(read_tensors(body)), settings.rank, f"the adapter {name!r}")
    except ModelError as error:
        return outcome(False, str(error))
    return await _load(request, name, settings, factors)


async def _load(
    request: web.Request, name: str, settings: LoraSettings, factors: Mapping[str, Factors]
) -> web.Response:
    loaded = request.app[LOADED]
    await loaded.engine.call(adapters.load_named, loaded, name, settings, factors)
    return outcome(True, f"{len(factors)} layers have the adapter {name!r}", loaded_adapters=_names(loaded))


@routes.post("/unload_lora_adapter")
async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Remove an adapter. It is refused while requests use it; SGLang would wait for them."""
    name = need(await body_of(request), "lora_name", _NAME)
    loaded = request.app[LOADED]

    def unload() -> None:
        scheduler = loaded.engine.scheduler
        count = sum(seq.request.adapter == name for seq in (*scheduler.running, *scheduler.waiting))
        if count:
            raise WeightError(f"{count} requests with the adapter {name!r} have not ended: abort them, or wait")
        loaded.engine.runner.adapters.unload(name)

    await loaded.engine.call(unload)
    return outcome(True, f"unloaded the adapter {name!r}", loaded_adapters=_names(loaded))


def _names(loaded: Loaded) -> list[str]:
    return list(loaded.engine.runner.adapters.loaded)
