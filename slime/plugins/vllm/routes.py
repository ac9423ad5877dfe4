"""SGLang's routes for the state and the weights of an engine, answered by vLLM."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from aiohttp import web

from slime.plugins.embedded.served import WeightError, outcome
from slime.plugins.embedded.tensor_wire import GROUP_TIMEOUT
from slime.plugins.http.server import (
    BadRequest,
    body_of,
    json_answer,
    json_object,
    list_of,
    need,
    one_of,
    string,
    take,
    truth,
    whole,
)
from slime.plugins.vllm.engine import Loaded, VllmEngine

routes = web.RouteTableDef()
VLLM: web.AppKey[Loaded] = web.AppKey("vllm")
TAGS = ("weights", "kv_cache", "cuda_graph")
ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")
_NAME = string(4096)


def _engine(request: web.Request) -> VllmEngine:
    return request.app[VLLM].engine


# --- state ---------------------------------------------------------------------------------------


@routes.post("/pause_generation")
async def pause_generation(request: web.Request) -> web.Response:
    mode = take(await body_of(request), "mode", one_of("abort", "retract", "in_place"), "abort")
    await _engine(request).pause(mode)
    return outcome(True, "Generation paused successfully.")


@routes.post("/continue_generation")
async def continue_generation(request: web.Request) -> web.Response:
    await _engine(request).resume()
    return outcome(True, "Generation continued successfully.")


@routes.post("/flush_cache")
async def flush_cache(request: web.Request) -> web.Response:
    flushed = await _engine(request).llm.reset_prefix_cache()
    return outcome(flushed, "Cache flushed." if flushed else "Requests hold parts of the cache.")


@routes.post("/release_memory_occupation")
@routes.post("/resume_memory_occupation")
async def memory_occupation(request: web.Request) -> web.Response:
    engine = _engine(request)
    tags = take(await body_of(request), "tags", list_of(one_of(*TAGS), len(TAGS)), []) or list(TAGS)
    change = engine.release if request.path.startswith("/release") else engine.take_back
    await change(tags)
    return json_answer(None)


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(request: web.Request) -> web.Response:
    loaded = request.app[VLLM]
    answer = {"model_path": loaded.model_path, "weight_version": loaded.engine.version}
    return json_answer({**answer, "tokenizer_path": loaded.model_path, "is_generation": True})


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: web.Request) -> web.Response:
    """Describe the engine. It tells its kind and what it supports, which slime believes."""
    loaded = request.app[VLLM]
    engine = loaded.engine
    state = {
        "weight_version": engine.version,
        "halted": sorted(engine.halted),
        "released": sorted(engine.released),
        "adapters": sorted(engine.adapters),
    }
    return json_answer({**loaded.info, "internal_states": [state]})


@routes.get("/v1/loads")
async def loads(request: web.Request) -> web.Response:
    """Count the requests. One runs from its first token on."""
    sequences = list(_engine(request).sequences.values())
    running = [one for one in sequences if one.num_output]
    core = {
        "num_running_reqs": len(running),
        "num_waiting_reqs": len(sequences) - len(running),
        "num_used_tokens": sum(len(one.tokens) for one in running),
    }
    return json_answer({"loads": [core]})


# --- weights -------------------------------------------------------------------------------------


@routes.post("/begin_weight_update")
async def begin_weight_update(request: web.Request) -> web.Response:
    opened = await _engine(request).begin_update()
    return outcome(
        opened,
        "Success" if opened else "an update is open already; call /end_weight_update first",
    )


@routes.post("/end_weight_update")
async def end_weight_update(request: web.Request) -> web.Response:
    closed = await _engine(request).end_update()
    return outcome(
        closed, "Success" if closed else "no update is open; call /begin_weight_update first"
    )


@routes.post("/update_weights_from_tensor")
@routes.post("/update_weights_from_distributed")
async def update_weights(request: web.Request) -> web.Response:
    """Load tensors from handles (:mod:`slime.engines.payload`), or those that rank 0 broadcasts."""
    body = await body_of(request)
    version = take(body, "weight_version", _NAME, None)
    engine = _engine(request)
    if "update" not in engine.halted:
        raise WeightError(
            f"{request.path} must be called between /begin_weight_update and /end_weight_update"
        )
    method = "slime_tensors" if request.path.endswith("tensor") else "slime_receive"
    await engine.change(version, method, json.dumps(body))
    return outcome(True, "Success")


@routes.post("/init_weights_update_group")
async def init_weights_update_group(request: web.Request) -> web.Response:
    body = await body_of(request)
    world = need(body, "world_size", whole(1, 2**20))
    await _engine(request).on_workers(
        "slime_join",
        need(body, "master_address", _NAME),
        need(body, "master_port", whole(1, 65535)),
        need(body, "rank_offset", whole(0, world - 1)),
        world,
        need(body, "group_name", _NAME),
        take(body, "backend", one_of("nccl", "gloo"), "nccl"),
        GROUP_TIMEOUT.total_seconds(),
    )
    return outcome(True, "Success")


@routes.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: web.Request) -> web.Response:
    await _engine(request).on_workers(
        "slime_leave", need(await body_of(request), "group_name", _NAME)
    )
    return outcome(True, "Success")


@routes.post("/update_weights_from_disk")
async def update_weights_from_disk(request: web.Request) -> web.Response:
    body = await body_of(request)
    folder = Path(need(body, "model_path", _NAME)).expanduser()
    if not folder.is_dir():
        raise BadRequest(f"model_path: there is no folder {folder}")
    engine = _engine(request)
    await engine.change(take(body, "weight_version", _NAME, None), "slime_reload", str(folder))
    return outcome(True, f"loaded {folder}", num_paused_requests=len(engine.sequences))


@routes.post("/update_weight_version")
async def update_weight_version(request: web.Request) -> web.Response:
    body = await body_of(request)
    engine = _engine(request)
    if take(body, "abort_all_requests", truth, True):
        engine.abort(None)
    version = need(body, "new_version", _NAME)
    await engine.name_version(version)
    return outcome(True, f"Weight version updated to {version}", new_version=version)


@routes.post("/get_weights_by_name")
async def get_weights_by_name(request: web.Request) -> web.Response:
    body = await body_of(request)
    name = need(body, "name", _NAME)
    most = take(body, "truncate_size", whole(0, 2**20), 100)
    values = (await _engine(request).on_workers("slime_values", name, most))[0]
    if values is None:
        raise BadRequest(f"name: the model has no tensor {name!r}")
    return json_answer(values)


@routes.post("/weights_checker")
async def weights_checker(request: web.Request) -> web.Response:
    """Return checksums, or test whether an update writes every tensor; see the embedded engine."""
    action = take(await body_of(request), "action", one_of(*ACTIONS), "checksum")
    engine = _engine(request)
    if action == "checksum":
        ranks = await engine.on_workers("slime_checksums")
        return outcome(True, "Success", ranks=[{"checksums": one} for one in ranks])
    if action == "reset_tensors":
        await engine.change(None, "slime_reset")
    elif action == "snapshot":
        await engine.on_workers("slime_snapshot")
    else:
        different = [name for names in await engine.on_workers("slime_compare") for name in names]
        if different:
            shown = ", ".join(different[:5])
            return outcome(False, f"{len(different)} tensors differ from the snapshot: {shown}")
    return outcome(True, "Success")


# --- adapters ------------------------------------------------------------------------------------


@routes.post("/load_lora_adapter")
async def load_lora_adapter(request: web.Request) -> web.Response:
    body = await body_of(request)
    folder = need(body, "lora_path", _NAME)
    await _engine(request).load_adapter(need(body, "lora_name", _NAME), folder)
    return outcome(True, "Success")


@routes.post("/load_lora_adapter_from_tensors")
async def load_lora_adapter_from_tensors(request: web.Request) -> web.Response:
    """Load the factors of an adapter from a handle. vLLM reads adapters from folders only, so they
    are written to one that is removed with the adapter.
    """
    from safetensors.torch import save_file

    from slime.plugins.embedded.tensor_wire import read_tensors

    body = await body_of(request)
    name = need(body, "lora_name", _NAME)
    config = need(body, "config_dict", json_object)
    tensors = {key: tensor.contiguous() for key, tensor in read_tensors(body)}
    folder = tempfile.TemporaryDirectory(prefix="slime-adapter-")
    save_file(tensors, Path(folder.name, "adapter_model.safetensors"))
    Path(folder.name, "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    await _engine(request).load_adapter(name, folder.name, folder)
    return outcome(True, "Success")


@routes.post("/unload_lora_adapter")
async def unload_lora_adapter(request: web.Request) -> web.Response:
    await _engine(request).unload_adapter(need(await body_of(request), "lora_name", _NAME))
    return outcome(True, "Success")
