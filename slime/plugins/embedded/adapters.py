"""Give layers of the model an adapter (LoRA), whose factors updates then write by their names in
PEFT's files.

Other adapters are loaded by name, and requests choose one of them by ``lora_path``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from aiohttp import web
from torch import nn

from slime.models.cpu_kernels import CpuLinear
from slime.models.lora import LoraLinear, LoraSettings, attach, lora_layers
from slime.models.peft_files import Factors, factors_of, other_forms, read_config, read_factors
from slime.models.shards import ModelError
from slime.plugins.embedded.loading import Loaded, make_reproducible
from slime.plugins.embedded.served import LOADED, WeightError, outcome
from slime.plugins.embedded.tensor_wire import read_tensors
from slime.plugins.http.server import (
    BadRequest,
    body_of,
    json_object,
    list_of,
    need,
    number,
    string,
    take,
    truth,
    whole,
)

_MAX_LAYERS = 65536


def read_settings(config: Mapping[str, object]) -> tuple[LoraSettings, list[str]]:
    """Read PEFT's ``adapter_config.json``, and return the shape of the adapter and the names of its
    layers.

    Raises:
        BadRequest: A field is missing or has a wrong type, or the adapter has a form that slime
            does not support.
    """
    rank = need(config, "r", whole(1, 2**16), "config_dict.")
    alpha = need(config, "lora_alpha", number(0, 1e9, above=True), "config_dict.")
    names = need(config, "target_modules", list_of(string(4096), _MAX_LAYERS), "config_dict.")
    if other := other_forms(config):
        raise BadRequest(f"config_dict has {', '.join(other)}, which slime does not support"[:2000])
    if not names:
        raise BadRequest(
            "config_dict.target_modules must have the names of the layers with an adapter"
        )
    return LoraSettings(rank, alpha, rslora=take(config, "use_rslora", truth, False)), names


def set_layers(loaded: Loaded, settings: LoraSettings, names: Sequence[str]) -> None:
    """Give exactly these layers an adapter, which is zero until an update writes it. It runs on the
    model thread.

    If the layers have such an adapter already, nothing changes. Otherwise running requests are
    computed again.

    Raises:
        WeightError: The model has no linear layer of a name.
    """
    engine = loaded.engine
    runner = loaded.engine.runner
    present = lora_layers(runner.model)
    if list(present) == list(names) and all(_same(layer, settings) for layer in present.values()):
        return
    linears = {
        name: module
        for name, module in runner.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    if missing := [name for name in names if name not in linears]:
        raise WeightError(
            f"the model has no linear layer {missing[0]!r}, which shall have an adapter"
        )
    engine.forget_computed()
    for layer in present.values():
        _detach(layer)
    generator = torch.Generator().manual_seed(0)
    for name in names:
        module = linears[name]
        a, b = (torch.randn(shape, generator=generator) for shape in _shapes(module, settings.rank))
        # Random values for now, because zeros would hide differences between row counts.
        attach(module, a.to(module.weight) / module.in_features**0.5, b.to(module.weight), settings)
    runner.model.requires_grad_(False)
    engine.weights.find_views()
    runner.weights_changed()
    if runner.deterministic:
        make_reproducible(runner, loaded.vocab_size, loaded.options.random_seed)
    for layer in lora_layers(runner.model).values():
        layer.lora_B.data.zero_()


def load_named(
    loaded: Loaded, name: str, settings: LoraSettings, factors: Mapping[str, Factors]
) -> None:
    """Load an adapter that requests choose by name. It runs on the model thread.

    A deterministic engine measures again which row counts give the same bits, so running requests
    are computed again.

    Raises:
        WeightError: The name is taken, there are too many adapters, or the factors do not fit the
            model.
    """
    engine = loaded.engine
    runner = loaded.engine.runner
    runner.adapters.load(name, settings, factors)
    if runner.deterministic:
        engine.forget_computed()
        make_reproducible(runner, loaded.vocab_size, loaded.options.random_seed)


def _same(layer: LoraLinear, settings: LoraSettings) -> bool:
    return layer.lora_scale == settings.scale and layer.lora_A.shape[0] == settings.rank


def _shapes(module: nn.Linear, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (rank, module.in_features), (module.out_features, rank)


def _detach(layer: LoraLinear) -> None:
    del layer.lora_A, layer.lora_B
    layer.__class__ = CpuLinear  # type: ignore[assignment]  # which is a plain linear layer on other devices


# --- routes, with SGLang's names ------------------------------------------------------------------

routes = web.RouteTableDef()
_NAME = string(4096)


@routes.post("/load_lora_adapter")
async def load_lora_adapter(request: web.Request) -> web.Response:
    """Load PEFT's files from the folder ``lora_path`` under the name ``lora_name``."""
    body = await body_of(request)
    name = need(body, "lora_name", _NAME)
    folder = Path(need(body, "lora_path", _NAME)).expanduser()

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
    """Load factors from handles (see :mod:`slime.engines.payload`) under the name ``lora_name``."""
    body = await body_of(request)
    name = need(body, "lora_name", _NAME)
    settings, _ = read_settings(need(body, "config_dict", json_object))
    try:
        factors = factors_of(dict(read_tensors(body)), settings.rank, f"the adapter {name!r}")
    except ModelError as error:
        return outcome(False, str(error))
    return await _load(request, name, settings, factors)


async def _load(
    request: web.Request, name: str, settings: LoraSettings, factors: Mapping[str, Factors]
) -> web.Response:
    loaded = request.app[LOADED]
    await loaded.engine.call(load_named, loaded, name, settings, factors)
    return outcome(
        True, f"{len(factors)} layers have the adapter {name!r}", loaded_adapters=_names(loaded)
    )


@routes.post("/unload_lora_adapter")
async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Remove an adapter. It is refused while requests use it; SGLang would wait for them."""
    name = need(await body_of(request), "lora_name", _NAME)
    loaded = request.app[LOADED]

    def unload() -> None:
        scheduler = loaded.engine.scheduler
        count = sum(
            seq.request.lora_path == name for seq in (*scheduler.running, *scheduler.waiting)
        )
        if count:
            raise WeightError(
                f"{count} requests with the adapter {name!r} have not ended: abort them, or wait"
            )
        loaded.engine.runner.adapters.unload(name)

    await loaded.engine.call(unload)
    return outcome(True, f"unloaded the adapter {name!r}", loaded_adapters=_names(loaded))


def _names(loaded: Loaded) -> list[str]:
    return list(loaded.engine.runner.adapters.loaded)
