"""The server, and the routes that train and sample. Each reads a request and submits a command;
what the API has and this server does not is answered with 404 and a sentence."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.config.rollout import served_context
from slime.plugins.http.server import (
    MISTAKES,
    MOST_BYTES,
    BadRequest,
    body_of,
    errors_as_json,
    json_answer,
    json_object,
    need,
    number,
    request_guard,
    take,
    whole,
)
from slime.plugins.serve import runs
from slime.plugins.serve.adapters import facts_of
from slime.plugins.serve.limits import OverLimit
from slime.plugins.serve.log import Record
from slime.plugins.serve.messages import read_batch, sampling_body
from slime.plugins.serve.runs import (
    PREFIX,
    SECRET,
    STATE_KEY,
    TENANT,
    base_name,
    tenants,
)
from slime.plugins.serve.state import Model, State, Unknown
from slime.plugins.serve.trainer import STATE, checked_name

MOST = 2**53
COUNT = whole(0, MOST)
SIZE = number(0, MOST)
POLL_SECONDS = 25.0
SILENT_SECONDS = 900
"""After so long without a heartbeat, a model makes room for a new one of its tenant."""
routes = web.RouteTableDef()


def make_app(state: State, keys: dict[str, str], secret: bytes) -> web.Application:
    """Return the server.

    Args:
        keys: The key of each tenant, by the tenant's name.
        secret: Signs the addresses of files.
    """
    middlewares = [
        errors_as_json(lambda message: {"detail": message, "error": message}, MISTAKES),
        request_guard(only_json=False),  # a web page cannot send the key of a tenant
        tenants(keys),
    ]
    app = web.Application(client_max_size=MOST_BYTES, middlewares=middlewares)
    app[STATE_KEY] = state
    app[SECRET] = secret
    app.add_routes([*routes, *runs.routes])
    app.router.add_route("*", PREFIX + "/{rest:.*}", _not_served)
    return app


async def _not_served(request: web.Request) -> web.Response:
    raise Unknown(f"{request.method} {request.path} is not served; docs/en/serve.md lists what is")


Serve = Callable[[State, str, dict[str, Any]], Coroutine[Any, Any, Any]]


def _post(path: str) -> Callable[[Serve], Serve]:
    """Register a function of the state, the tenant and the body, which returns an object."""

    def register(serve: Serve) -> Serve:
        async def handler(request: web.Request) -> web.Response:
            return json_answer(
                await serve(request.app[STATE_KEY], request[TENANT], await body_of(request))
            )

        routes.post(PREFIX + path)(handler)
        return serve

    return register


# --- the service ---------------------------------------------------------------------------------


@routes.get(PREFIX + "/healthz")
async def healthz(request: web.Request) -> web.Response:
    return json_answer({"status": "ok"})


_FIXED = {
    # Custom losses are computed by the client; requests come uncompressed.
    "/client/config": {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False},
    "/client/dynamic_config": {"refresh_interval_sec": 3600},
    "/telemetry": {"status": "accepted"},  # and not read
}
"""The requests that always have the same answer."""


async def _fixed(request: web.Request) -> web.Response:
    return json_answer(_FIXED[request.path.removeprefix(PREFIX)])


for _path in _FIXED:
    routes.post(PREFIX + _path)(_fixed)


@routes.get(PREFIX + "/get_server_capabilities")
async def capabilities(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    model = {
        "model_name": base_name(state),
        "max_context_length": served_context(state.args),
        "trainable": True,
        "sampleable": True,
    }
    teachers = [
        {"model_name": name, "trainable": False, "sampleable": True} for name in state.teachers
    ]
    return json_answer({"supported_models": [model, *teachers]})


def _check_base(state: State, name: object) -> None:
    path = Path(base_name(state))
    known = {str(path), str(path.absolute()), path.name}
    if name not in known:
        raise BadRequest(f"this server has the base model {path}, not {name}")


@_post("/create_session")
async def create_session(state: State, tenant: str, body: dict[str, Any]) -> Any:
    record: Record = {"do": "create_session", "id": secrets.token_hex(12), "tenant": tenant}
    record["metadata"] = body.get("user_metadata")
    return {"session_id": state.submit(record), "type": "create_session"}


@_post("/session_heartbeat")
async def session_heartbeat(state: State, tenant: str, body: dict[str, Any]) -> Any:
    state.heard(state.session_of(body["session_id"], tenant)["id"])
    return {"type": "session_heartbeat"}


@routes.post(PREFIX + "/sessions/{name}/finish")
async def finish(request: web.Request) -> web.Response:
    """Free the models of a session, whose client is done; what it saved stays."""
    state = request.app[STATE_KEY]
    session = state.session_of(request.match_info["name"], request[TENANT])
    for model in list(state.models.values()):
        if model.id.startswith(f"{session['id']}:"):
            _unload(state, model)
    return json_answer({})


# --- training ------------------------------------------------------------------------------------


def _future(state: State, record: Record, tokens: int = 0) -> dict[str, Any]:
    return {"request_id": state.submit(record, tokens), "model_id": record["model"]}


def _new_model(state: State, tenant: str, body: dict[str, Any]) -> Record:
    """Return what the first command of a model has in any case."""
    session = state.session_of(body["session_id"], tenant)["id"]
    place = need(body, "model_seq_id", COUNT)
    model = f"{session}:train:{place}"
    mine = [one for one in state.models.values() if one.tenant == tenant]
    most = state.limits_of(tenant).models
    if most is not None and len(mine) >= most and model not in state.models:
        silent = [one for one in mine if state.silent_seconds(one) > SILENT_SECONDS]
        if not silent:
            raise OverLimit(
                f"{tenant} has {len(mine)} models, the most that it may: unload one, or wait until "
                f"a client was silent for {SILENT_SECONDS} seconds"
            )
        _unload(state, silent[0])
    optimizer = take(body, "optimizer_config", json_object, {})
    if optimizer.get("type", "adamw") != "adamw":
        raise BadRequest(f"the optimizer {optimizer['type']} is not served, only adamw")
    common = {"tenant": tenant, "model": model, "number": 0, "place": place}
    return {"id": f"{model}:0", **common, "metadata": body.get("user_metadata")}


@_post("/create_model")
async def create_model(state: State, tenant: str, body: dict[str, Any]) -> Any:
    _check_base(state, body["base_model"])
    # slime's extension of the API: a model of rank 0, or without an adapter, has all weights
    lora = take(body, "lora_config", json_object, {"rank": 0})
    rank = need(lora, "rank", whole(0, 512), "lora_config.")
    if not lora.get("train_mlp", True) or not lora.get("train_attn", True):
        raise BadRequest("adapters have all linear layers: train_mlp and train_attn must be True")
    record = _new_model(state, tenant, body)
    seed = take(lora, "seed", whole(-(2**63), MOST), None, "lora_config.")
    return _future(state, {"do": "create_model", **record, "rank": rank, "seed": seed})


@_post("/load_weights")
async def load_weights(state: State, tenant: str, body: dict[str, Any]) -> Any:
    folder = state.weights_of(body["path"], tenant)
    if not (folder / STATE).is_file():
        raise BadRequest(f"{body['path']} has no training state: load what save_state wrote")
    if body.get("model_id"):
        record = _command(state, tenant, body)
    else:
        if body.get("base_model"):
            _check_base(state, body["base_model"])
        record = {**_new_model(state, tenant, body), "rank": facts_of(folder / STATE)["rank"]}
    told = {"path": body["path"], "optimizer": bool(body.get("optimizer"))}
    return _future(state, {"do": "load_weights", **record, **told})


def _command(state: State, tenant: str, body: dict[str, Any]) -> Record:
    """Return what every command of a model has in any case."""
    number = need(body, "seq_id", whole(1, MOST))
    name = str(body["model_id"])
    known = state.commands.get(f"{name}:{number}")
    if known is None or known["tenant"] != tenant:
        model = state.model_of(name, tenant)
        if number < model.next:
            raise BadRequest(f"the model {name} is past the request {number}")
    return {"id": f"{name}:{number}", "tenant": tenant, "model": name, "number": number}


@routes.post(PREFIX + "/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    body = await request.read()
    batch = read_batch(body)  # refuses it here, before it is a command
    record = _command(state, request[TENANT], {"model_id": batch.model, "seq_id": batch.number})
    text = base64.b64encode(body).decode()
    record = {"do": "forward_backward", **record, "body": text}
    return json_answer(_future(state, record, sum(len(one.tokens) for one in batch.data)))


@_post("/optim_step")
async def optim_step(state: State, tenant: str, body: dict[str, Any]) -> Any:
    given = need(body, "adam_params", json_object)
    adam = {"lr": need(given, "learning_rate", SIZE, "adam_params.")}
    for name, theirs in (("beta1", "beta1"), ("beta2", "beta2"), ("eps", "eps"),
                         ("weight_decay", "weight_decay"), ("clip_grad", "grad_clip_norm")):  # fmt: skip
        value = take(given, theirs, SIZE, None, "adam_params.")
        if value is not None:
            adam[name] = value
    return _future(state, {"do": "optim_step", **_command(state, tenant, body), "adam": adam})


@_post("/save_weights")
async def save_weights(state: State, tenant: str, body: dict[str, Any]) -> Any:
    return _future(state, _saving(state, tenant, body, "save_weights"))


@_post("/save_weights_for_sampler")
async def save_weights_for_sampler(state: State, tenant: str, body: dict[str, Any]) -> Any:
    record = _saving(state, tenant, body, "save_weights_for_sampler")
    if body.get("kind", "snapshot") != "snapshot":
        raise BadRequest("inflight samplers are not served, only snapshots")
    if record["name"] is None:
        session = str(record["model"]).partition(":")[0]
        place = need(body, "sampling_session_seq_id", COUNT)
        record |= {"sampler": f"{session}:sample:{place}", "place": place}
    return _future(state, record)


@_post("/save_weights_external")
async def save_weights_external(state: State, tenant: str, body: dict[str, Any]) -> Any:
    if body.get("age_encryption_recipients"):
        raise BadRequest("encrypted exports are not served: leave out the recipients")
    return _future(state, _saving(state, tenant, body, "save_weights_external"))


def _saving(state: State, tenant: str, body: dict[str, Any], do: str) -> Record:
    seconds = take(body, "ttl_seconds", whole(1, MOST), None)
    record = {"do": do, **_command(state, tenant, body), "name": checked_name(body.get("path"))}
    return {**record, "overwrite": bool(body.get("overwrite")), "seconds": seconds}


@_post("/unload_model")
async def unload_model(state: State, tenant: str, body: dict[str, Any]) -> Any:
    return _unload(state, state.model_of(body["model_id"], tenant))


def _unload(state: State, model: Model) -> dict[str, Any]:
    number = max([model.next, *(number + 1 for number in model.waiting)])
    record = {"do": "unload_model", "id": f"{model.id}:{number}", "tenant": model.tenant}
    return _future(state, {**record, "model": model.id, "number": number})


@_post("/get_info")
async def get_info(state: State, tenant: str, body: dict[str, Any]) -> Any:
    model = state.model_of(body["model_id"], tenant)
    base = base_name(state)
    data = {"model_name": base, "tokenizer_id": base}
    told = {
        "model_id": model.id,
        "is_lora": model.rank > 0,
        "lora_rank": model.rank,
        "model_name": base,
    }
    return {"type": "get_info", "model_data": data, **told}


# --- sampling ------------------------------------------------------------------------------------


@_post("/create_sampling_session")
async def create_sampling_session(state: State, tenant: str, body: dict[str, Any]) -> Any:
    session = state.session_of(body["session_id"], tenant)["id"]
    place = need(body, "sampling_session_seq_id", COUNT)
    path = body.get("model_path")
    teacher = None
    if path is None and body.get("base_model") in state.teachers:
        teacher = body["base_model"]
    elif path is None:
        _check_base(state, body.get("base_model"))
    elif not state.trainer.can_be_sampled(state.weights_of(path, tenant)):
        raise BadRequest(f"{path} cannot be sampled: use what save_weights_for_sampler wrote")
    name = f"{session}:sample:{place}"
    record = {"do": "create_sampler", "id": name, "tenant": tenant, "path": path, "place": place}
    record["teacher"] = teacher
    return {"sampling_session_id": state.submit(record), "type": "create_sampling_session"}


@_post("/join_sampling_session")
async def join_sampling_session(state: State, tenant: str, body: dict[str, Any]) -> Any:
    sampler = state.sampler_of(body["sampling_session_id"], tenant)
    sampler.joined += 1
    return {"type": "join_sampling_session", "client_counter": sampler.joined}


@_post("/asample")
async def asample(state: State, tenant: str, body: dict[str, Any]) -> Any:
    sampler = state.sampler_of(body.get("sampling_session_id"), tenant)
    number = need(body, "seq_id", COUNT)
    asked = sampling_body(body, None, 0)  # refuses it here, before it is a command
    params = asked["sampling_params"]
    tokens = len(asked["input_ids"]) + params["n"] * int(params.get("max_new_tokens", 0))
    name = f"{sampler.id}:{number}"
    record = {"do": "sample", "id": name, "tenant": tenant, "sampler_id": sampler.id}
    command = state.submit({**record, "request": body}, tokens)
    names = [f"{name}:{i}" for i in range(params["n"])]
    return {"request_id": command, "sample_sequence_ids": names}


# --- answers -------------------------------------------------------------------------------------


@routes.post(PREFIX + "/retrieve_future")
async def retrieve_future(request: web.Request) -> web.Response:
    body = await body_of(request)
    command = str(body["request_id"])
    answer = await request.app[STATE_KEY].answer(command, request[TENANT], POLL_SECONDS)
    if answer is None:
        waiting = {"type": "try_again", "request_id": command, "queue_state": "active"}
        return json_answer(waiting, 408)
    if answer.error is not None:
        return json_answer({"error": answer.error, "category": answer.blame})
    if answer.data is not None:
        return web.Response(body=answer.data, content_type="application/x-protobuf")
    return json_answer(answer.value)
