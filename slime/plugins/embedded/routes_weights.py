"""Routes for weights: begin and end an update, load tensors (by handle, broadcast or from disk),
and check them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from aiohttp import web
from torch.distributed import ProcessGroup

from slime.config.hooks import load_function
from slime.plugins.embedded import adapters
from slime.plugins.embedded.served import LOADED, WeightError, engine_of, outcome
from slime.plugins.embedded.tensor_wire import (
    GROUP_TIMEOUT,
    announced,
    join_group,
    read_tensors,
    receive,
)
from slime.plugins.http.server import (
    BadRequest,
    body_of,
    json_answer,
    json_object,
    need,
    one_of,
    refuse,
    string,
    take,
    truth,
    whole,
)
from slime.registry import find, parts

routes = web.RouteTableDef()
ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")
MAX_GROUPS = 4
_NAME = string(4096)  # the name of a tensor, group or version
_joiners = ThreadPoolExecutor(MAX_GROUPS, thread_name_prefix="weight-group")
"""Threads that join groups. Joining waits for all members of the group, so it must delay nothing
else.
"""

GROUPS: web.AppKey[dict[str, ProcessGroup | None]] = web.AppKey("groups", dict)
"""The process groups by name. The value is None while the group is being joined."""


@routes.post("/begin_weight_update")
async def begin_weight_update(request: web.Request) -> web.Response:
    engine = engine_of(request)
    opened = await engine.call(engine.begin_update)
    return outcome(
        opened,
        "Success" if opened else "a weight update is open already; call /end_weight_update first",
    )


@routes.post("/end_weight_update")
async def end_weight_update(request: web.Request) -> web.Response:
    engine = engine_of(request)
    closed = await engine.call(engine.end_update)
    return outcome(
        closed, "Success" if closed else "no weight update is open; call /begin_weight_update first"
    )


def _require_open(request: web.Request) -> None:
    if "update" not in engine_of(request).halted:
        raise WeightError(
            f"{request.path} must be called between /begin_weight_update and /end_weight_update"
        )


def _weight_loaders() -> list[str | None]:
    """The loaders of the registered transports; a request may name no other function."""
    kinds = "weight mode", "transport"
    return [find(kind, name).weight_loader for kind in kinds for name in parts(kind)]


@routes.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: web.Request) -> web.Response:
    """Load tensors from handles (see :mod:`slime.engines.payload`), or load a published delta."""
    body = await body_of(request)
    loader = body.get("load_format")
    published = (
        need(body, "loader_request", string(65536))
        if loader and loader in _weight_loaders()
        else None
    )
    version = take(body, "weight_version", _NAME, None)
    _require_open(request)
    engine = engine_of(request)
    weights = engine.weights

    def write() -> None:
        if published is not None:
            status = load_function(str(loader))(
                weights, [(published, torch.empty(0, device=engine.runner.device))]
            )
            if status.outcome != "loaded":
                raise WeightError(
                    f"the published weights were not loaded ({status.outcome}): {status.message}"
                )
        else:
            weights.load(read_tensors(body))

    await engine.call(engine.change_weights, write, version)
    return outcome(True, "Success")


@routes.post("/set_lora_layers")
async def set_lora_layers(request: web.Request) -> web.Response:
    """Give the layers of ``config_dict``, which has the form of PEFT's ``adapter_config.json``, an
    adapter.

    The adapter is zero until an update writes its factors, as tensors with their names in PEFT's
    files.
    """
    body = await body_of(request)
    settings, names = adapters.read_settings(need(body, "config_dict", json_object))
    _require_open(request)
    loaded = request.app[LOADED]
    await loaded.engine.call(adapters.set_layers, loaded, settings, names)
    return outcome(True, f"{len(names)} layers have an adapter")


@routes.post("/init_weights_update_group")
async def init_weights_update_group(request: web.Request) -> web.Response:
    body = await body_of(request)
    name = _group_name(body)
    groups = request.app[GROUPS]
    # A name stands for one group, and their number is limited.
    if name in groups:
        raise BadRequest(f"the process group {name!r} exists already; destroy it first")
    if len(groups) >= MAX_GROUPS:
        raise BadRequest(f"there are {len(groups)} process groups already; destroy one first")
    # All fields are checked before the name is reserved.
    world_size = need(body, "world_size", whole(1, 2**20))
    arguments = (
        need(body, "master_address", string(253)),
        need(body, "master_port", whole(1, 65535)),
        need(body, "rank_offset", whole(0, world_size - 1)),
        world_size,
        name,
        take(body, "backend", one_of("nccl", "gloo"), "nccl"),
        GROUP_TIMEOUT,
    )
    groups[name] = None  # reserves the name and one of MAX_GROUPS while the join waits
    try:
        groups[name] = await asyncio.get_running_loop().run_in_executor(
            _joiners, lambda: join_group(*arguments)
        )
    except RuntimeError as error:
        return outcome(False, f"could not join the group {name!r}: {error}")
    finally:
        if groups.get(name) is None:
            groups.pop(name, None)
    return outcome(True, f"joined the group {name!r}")


def _group_name(body: Mapping[str, object]) -> str:
    return take(body, "group_name", _NAME, "weight_update_group")


@routes.post("/update_weights_from_distributed")
async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """Receive and load tensors that rank 0 broadcasts.

    There is one broadcast per tensor, in the order of ``names``. With the ``load_format``
    "flattened_bucket" there is one broadcast with the bytes of all tensors, without gaps.
    """
    body = await body_of(request)
    tensors, flat = announced(body)
    # The group and the update must be open, since the broadcast waits for all members.
    version = take(body, "weight_version", _NAME, None)
    group = request.app[GROUPS].get(_group_name(body))
    if group is None:
        raise BadRequest(
            f"there is no process group {_group_name(body)!r}; call /init_weights_update_group "
            "first"
        )
    _require_open(request)
    engine = engine_of(request)

    # On the model's thread, between two steps.
    def write() -> int:
        return engine.weights.load(receive(tensors, group, engine.runner.device, flat))

    try:
        await engine.call(engine.change_weights, write, version)
    except RuntimeError as error:
        return outcome(False, f"Failed to receive weights: {error}")
    return outcome(True, "Succeeded to update parameter online.")


@routes.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: web.Request) -> web.Response:
    name = _group_name(await body_of(request))
    groups = request.app[GROUPS]
    if groups.get(name) is None:
        return outcome(False, f"no group {name!r}")
    group = groups.pop(name)
    await asyncio.get_running_loop().run_in_executor(
        _joiners, torch.distributed.destroy_process_group, group
    )
    return outcome(True, f"destroyed the group {name!r}")


def _path(value: object, name: str) -> str:
    path = string(4096)(value, name)
    if "\0" in path:
        raise refuse(name, "must be the path of a folder", path)
    return os.path.expanduser(path)


@routes.post("/update_weights_from_disk")
async def update_weights_from_disk(request: web.Request) -> web.Response:
    body = await body_of(request)
    folder = Path(need(body, "model_path", _path))
    version = take(body, "weight_version", _NAME, None)
    engine = engine_of(request)

    def write() -> int:
        return engine.weights.load_folder(folder)

    count = await engine.call(engine.change_weights, write, version)
    running = len(engine.scheduler.running) + len(engine.scheduler.waiting)
    return outcome(True, f"loaded {count} tensors from {folder}", num_paused_requests=running)


@routes.post("/update_weight_version")
async def update_weight_version(request: web.Request) -> web.Response:
    body = await body_of(request)
    version = need(body, "new_version", _NAME)
    engine = engine_of(request)
    if take(body, "abort_all_requests", truth, True):
        await engine.call(engine.abort, None)
    await engine.call(engine.rename_version, version)
    return outcome(True, f"Weight version updated to {version}", new_version=version)


@routes.get("/get_weight_version")
async def get_weight_version(request: web.Request) -> web.Response:
    return json_answer({"weight_version": engine_of(request).scheduler.weight_version})


@routes.post("/get_weights_by_name")
async def get_weights_by_name(request: web.Request) -> web.Response:
    body = await body_of(request)
    engine = engine_of(request)
    name = need(body, "name", _NAME)
    most = take(body, "truncate_size", whole(0, 2**20), 100)
    return json_answer(await engine.call(engine.weights.get, name, most))


@routes.post("/weights_checker")
async def weights_checker(request: web.Request) -> web.Response:
    """Return checksums, or test whether an update writes every tensor.

    The test has three actions: ``snapshot`` keeps a copy of all tensors, ``reset_tensors``
    overwrites the tensors, and after the update ``compare`` compares them with the copy.
    """
    action = take(await body_of(request), "action", one_of(*ACTIONS), "checksum")
    engine = engine_of(request)
    weights = engine.weights
    if action == "checksum":
        checksums = await engine.call(weights.checksums)
        return outcome(True, "Success", ranks=[{"checksums": checksums}])
    if action == "snapshot":
        await engine.call(weights.take_snapshot)
    elif action == "reset_tensors":
        await engine.call(engine.change_weights, weights.reset, None)
    else:
        different = await engine.call(weights.compare)
        if different:
            names = ", ".join(different[:5])
            return outcome(False, f"{len(different)} tensors differ from the snapshot: {names}")
    return outcome(True, "Success")
