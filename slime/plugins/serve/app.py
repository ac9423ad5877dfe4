"""The routes of the API. Each reads a request, submits a command or looks something up; what the
API has and this server does not is answered with 404 and a sentence."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from slime.config.rollout import served_context
from slime.engines.request_guard import names_this_server
from slime.plugins.serve.adapters import facts_of
from slime.plugins.serve.log import Record
from slime.plugins.serve.messages import Refused, read_batch, sampling_body
from slime.plugins.serve.protobuf import Malformed
from slime.plugins.serve.state import Model, State, Unknown
from slime.plugins.serve.trainer import STATE, checked_name

MOST_BYTES = 64 << 20
POLL_SECONDS = 25.0
LINK_SECONDS = 3600
SILENT_SECONDS = 900
"""After so long without a heartbeat, a model makes room for a new one of its tenant."""
_STATE = web.AppKey("state", State)
_TENANT = web.RequestKey("tenant", str)
_PREFIX = "/api/v1"
routes = web.RouteTableDef()


def make_app(state: State, keys: dict[str, str], secret: bytes) -> web.Application:
    """Return the server.

    Args:
        keys: The key of each tenant, by the tenant's name.
        secret: Signs the addresses of files.
    """
    app = web.Application(client_max_size=MOST_BYTES, middlewares=[_guard(keys), _errors])
    app[_STATE] = state
    app[_SECRET] = secret
    app.add_routes(routes)
    app.router.add_route("*", _PREFIX + "/{rest:.*}", _not_served)
    return app


_SECRET = web.AppKey("secret", bytes)


def _guard(keys: dict[str, str]) -> Any:
    """Refuse a request before its body is read, if it comes from a web page, names another host, or
    has no tenant's key.
    """

    own = {"localhost", socket.gethostname().lower()}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        if "Origin" in headers or "Sec-Fetch-Site" in headers:
            return _failure(403, "requests from web pages are refused")
        if not names_this_server(headers.get("Host", ""), own):
            return _failure(403, "the Host header names another server; use an IP address")
        if headers.get("Content-Encoding", "identity") != "identity":
            return _failure(415, "compressed bodies are refused")
        given = headers.get("X-API-Key", "").encode(errors="surrogateescape")
        tenant = ""
        for name, key in keys.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, key.encode()):
                tenant = name
        open_paths = (f"{_PREFIX}/healthz", f"{_PREFIX}/files/")
        if not tenant and not request.path.startswith(open_paths):
            return _failure(401, "X-API-Key is not the key of a tenant of this server")
        request[_TENANT] = tenant
        return await handler(request)

    return guard


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Unknown as error:
        return _failure(404, str(error.args[0]))
    except (Refused, Malformed) as error:
        return _failure(422, str(error))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        return _failure(422, f"a field is missing or has a wrong value: {error}")


def _failure(status: int, message: str) -> web.Response:
    return _json({"detail": message, "error": message}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def _not_served(request: web.Request) -> web.Response:
    return _failure(
        404, f"{request.method} {request.path} is not served; docs/en/serve.md lists what is"
    )


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read() or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be an object")
    return body


Serve = Callable[[State, str, dict[str, Any]], Coroutine[Any, Any, Any]]


def _post(path: str) -> Callable[[Serve], Serve]:
    """Register a function of the state, the tenant and the body, which returns an object."""

    def register(serve: Serve) -> Serve:
        async def handler(request: web.Request) -> web.Response:
            return _json(await serve(request.app[_STATE], request[_TENANT], await _body(request)))

        routes.post(_PREFIX + path)(handler)
        return serve

    return register


# --- the service ---------------------------------------------------------------------------------


@routes.get(_PREFIX + "/healthz")
async def healthz(request: web.Request) -> web.Response:
    return _json({"status": "ok"})


@_post("/client/config")
async def client_config(state: State, tenant: str, body: dict[str, Any]) -> Any:
    # Custom losses are computed by the client; requests come uncompressed.
    return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False}


@_post("/client/dynamic_config")
async def client_dynamic_config(state: State, tenant: str, body: dict[str, Any]) -> Any:
    return {"refresh_interval_sec": 3600}


@_post("/telemetry")
async def telemetry(state: State, tenant: str, body: dict[str, Any]) -> Any:
    return {"status": "accepted"}  # and not read


@routes.get(_PREFIX + "/get_server_capabilities")
async def capabilities(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    model = {
        "model_name": base_name(state),
        "max_context_length": served_context(state.args),
        "trainable": True,
        "sampleable": True,
    }
    return _json({"supported_models": [model]})


def base_name(state: State) -> str:
    """Return the name of the base model: the folder or the hub id that the server was given."""
    return str(state.args.hf_checkpoint)


def _check_base(state: State, name: object) -> None:
    path = Path(base_name(state))
    known = {str(path), str(path.absolute()), path.name}
    if name not in known:
        raise Refused(f"this server has the base model {path}, not {name}")


@_post("/create_session")
async def create_session(state: State, tenant: str, body: dict[str, Any]) -> Any:
    record: Record = {"do": "create_session", "id": secrets.token_hex(12), "tenant": tenant}
    record["metadata"] = body.get("user_metadata")
    return {"session_id": state.submit(record), "type": "create_session"}


@_post("/session_heartbeat")
async def session_heartbeat(state: State, tenant: str, body: dict[str, Any]) -> Any:
    state.heard(state.session_of(body["session_id"], tenant)["id"])
    return {"type": "session_heartbeat"}


# --- training ------------------------------------------------------------------------------------


def _future(state: State, record: Record) -> dict[str, Any]:
    return {"request_id": state.submit(record), "model_id": record["model"]}


def _new_model(state: State, tenant: str, body: dict[str, Any]) -> Record:
    """Return what the first command of a model has in any case."""
    session = state.session_of(body["session_id"], tenant)["id"]
    place = _whole(body, "model_seq_id", 0)
    model = f"{session}:train:{place}"
    mine = [one for one in state.models.values() if one.tenant == tenant]
    if len(mine) >= state.most_models and model not in state.models:
        silent = [one for one in mine if state.silent_seconds(one) > SILENT_SECONDS]
        if not silent:
            raise Refused(
                f"{tenant} has {len(mine)} models, the most of this server: unload one, or wait "
                f"until a client was silent for {SILENT_SECONDS} seconds"
            )
        _unload(state, silent[0])
    optimizer = body.get("optimizer_config") or {}
    if optimizer.get("type", "adamw") != "adamw":
        raise Refused(f"the optimizer {optimizer['type']} is not served, only adamw")
    common = {"tenant": tenant, "model": model, "number": 0, "place": place}
    return {"id": f"{model}:0", **common, "metadata": body.get("user_metadata")}


@_post("/create_model")
async def create_model(state: State, tenant: str, body: dict[str, Any]) -> Any:
    _check_base(state, body["base_model"])
    lora = body.get("lora_config")
    if not lora:
        raise Refused("a model without lora_config would train all weights: not served")
    if not lora.get("train_mlp", True) or not lora.get("train_attn", True):
        raise Refused("adapters have all linear layers: train_mlp and train_attn must be True")
    record = _new_model(state, tenant, body)
    seed = None if lora.get("seed") is None else _whole(lora, "seed", -(2**63))
    rank = _whole(lora, "rank", 1, 512)
    return _future(state, {"do": "create_model", **record, "rank": rank, "seed": seed})


@_post("/load_weights")
async def load_weights(state: State, tenant: str, body: dict[str, Any]) -> Any:
    folder = state.weights_of(body["path"], tenant)
    if not (folder / STATE).is_file():
        raise Refused(f"{body['path']} has no training state: load what save_state wrote")
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
    number = _whole(body, "seq_id", 1)
    name = str(body["model_id"])
    known = state.commands.get(f"{name}:{number}")
    if known is None or known["tenant"] != tenant:
        model = state.model_of(name, tenant)
        if number < model.next:
            raise Refused(f"the model {name} is past the request {number}")
    return {"id": f"{name}:{number}", "tenant": tenant, "model": name, "number": number}


def _whole(body: dict[str, Any], name: str, low: int, high: int = 2**53) -> int:
    value = body[name]
    if type(value) is not int or not low <= value <= high:
        raise Refused(f"{name} must be a whole number from {low} to {high}, not {value!r:.60}")
    return value


@routes.post(_PREFIX + "/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    body = await request.read()
    batch = read_batch(body)  # refuses it here, before it is a command
    record = _command(state, request[_TENANT], {"model_id": batch.model, "seq_id": batch.number})
    text = base64.b64encode(body).decode()
    return _json(_future(state, {"do": "forward_backward", **record, "body": text}))


@_post("/optim_step")
async def optim_step(state: State, tenant: str, body: dict[str, Any]) -> Any:
    given = body.get("adam_params")
    if given is None:
        raise Refused("optim_step takes adam_params; other optimizers are not served")
    adam = {"lr": float(given["learning_rate"])}
    for name, theirs in (("beta1", "beta1"), ("beta2", "beta2"), ("eps", "eps"),
                         ("weight_decay", "weight_decay"), ("clip_grad", "grad_clip_norm")):  # fmt: skip
        if given.get(theirs) is not None:
            adam[name] = float(given[theirs])
    if not all(math.isfinite(x) and x >= 0 for x in adam.values()):
        raise Refused("adam_params must be finite and not negative")
    return _future(state, {"do": "optim_step", **_command(state, tenant, body), "adam": adam})


@_post("/save_weights")
async def save_weights(state: State, tenant: str, body: dict[str, Any]) -> Any:
    return _future(state, _saving(state, tenant, body, "save_weights"))


@_post("/save_weights_for_sampler")
async def save_weights_for_sampler(state: State, tenant: str, body: dict[str, Any]) -> Any:
    record = _saving(state, tenant, body, "save_weights_for_sampler")
    if body.get("kind", "snapshot") != "snapshot":
        raise Refused("inflight samplers are not served, only snapshots")
    if record["name"] is None:
        session = str(record["model"]).partition(":")[0]
        place = _whole(body, "sampling_session_seq_id", 0)
        record |= {"sampler": f"{session}:sample:{place}", "place": place}
    return _future(state, record)


@_post("/save_weights_external")
async def save_weights_external(state: State, tenant: str, body: dict[str, Any]) -> Any:
    if body.get("age_encryption_recipients"):
        raise Refused("encrypted exports are not served: leave out the recipients")
    return _future(state, _saving(state, tenant, body, "save_weights_external"))


def _saving(state: State, tenant: str, body: dict[str, Any], do: str) -> Record:
    seconds = None if body.get("ttl_seconds") is None else _whole(body, "ttl_seconds", 1)
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
    told = {"model_id": model.id, "is_lora": True, "lora_rank": model.rank, "model_name": base}
    return {"type": "get_info", "model_data": data, **told}


# --- sampling ------------------------------------------------------------------------------------


@_post("/create_sampling_session")
async def create_sampling_session(state: State, tenant: str, body: dict[str, Any]) -> Any:
    session = state.session_of(body["session_id"], tenant)["id"]
    place = _whole(body, "sampling_session_seq_id", 0)
    path = body.get("model_path")
    if path is None:
        _check_base(state, body.get("base_model"))
    elif not (state.weights_of(path, tenant) / "adapter_config.json").is_file():
        raise Refused(f"{path} cannot be sampled: use what save_weights_for_sampler wrote")
    name = f"{session}:sample:{place}"
    record = {"do": "create_sampler", "id": name, "tenant": tenant, "path": path, "place": place}
    return {"sampling_session_id": state.submit(record), "type": "create_sampling_session"}


@_post("/join_sampling_session")
async def join_sampling_session(state: State, tenant: str, body: dict[str, Any]) -> Any:
    sampler = state.sampler_of(body["sampling_session_id"], tenant)
    sampler.joined += 1
    return {"type": "join_sampling_session", "client_counter": sampler.joined}


@_post("/asample")
async def asample(state: State, tenant: str, body: dict[str, Any]) -> Any:
    sampler = state.sampler_of(body.get("sampling_session_id"), tenant)
    number = _whole(body, "seq_id", 0)
    sampling_body(body, None, 0)  # refuses it here, before it is a command
    name = f"{sampler.id}:{number}"
    record = {"do": "sample", "id": name, "tenant": tenant, "sampler_id": sampler.id}
    command = state.submit({**record, "request": body})
    names = [f"{name}:{i}" for i in range(body.get("num_samples", 1))]
    return {"request_id": command, "sample_sequence_ids": names}


# --- answers -------------------------------------------------------------------------------------


@routes.post(_PREFIX + "/retrieve_future")
async def retrieve_future(request: web.Request) -> web.Response:
    body = await _body(request)
    command = str(body["request_id"])
    answer = await request.app[_STATE].answer(command, request[_TENANT], POLL_SECONDS)
    if answer is None:
        waiting = {"type": "try_again", "request_id": command, "queue_state": "active"}
        return _json(waiting, 408)
    if answer.error is not None:
        return _json({"error": answer.error, "category": answer.blame})
    if answer.data is not None:
        return web.Response(body=answer.data, content_type="application/x-protobuf")
    return _json(answer.value)


# --- runs and checkpoints ------------------------------------------------------------------------


def _page(request: web.Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (int(request.query.get(name, default)) for name, default in
                     (("limit", 20), ("offset", 0)))  # fmt: skip
    if limit < 0 or offset < 0:
        raise Refused("limit and offset must not be negative")
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor


def _run(state: State, record: Record) -> dict[str, Any]:
    checkpoints = _checkpoints(state, record["model"])
    by_kind = {one["checkpoint_type"]: one for one in checkpoints}
    return {
        "training_run_id": record["model"],
        "base_model": base_name(state),
        "model_owner": record["tenant"],
        "is_lora": True,
        "lora_rank": record["rank"],
        "last_request_time": _time(state.trainer.model_folder(record["model"])),
        "last_checkpoint": by_kind.get("training"),
        "last_sampler_checkpoint": by_kind.get("sampler"),
        "user_metadata": record.get("metadata"),
    }


def _time(path: Path) -> str:
    seconds = path.stat().st_mtime if path.exists() else time.time()
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoints(state: State, model: str) -> list[dict[str, Any]]:
    found = []
    for path, kind, folder in state.trainer.checkpoints(model):
        size = sum(file.stat().st_size for file in folder.iterdir())
        found.append(
            {
                "checkpoint_id": "/".join(folder.parts[-2:]),
                "checkpoint_type": kind,
                "time": _time(folder),
                "tinker_path": path,
                "size_bytes": size,
                "expires_at": state.trainer.expiry(folder),
            }
        )
    return sorted(found, key=lambda one: str(one["time"]))


@routes.get(_PREFIX + "/training_runs")
async def training_runs(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    runs, cursor = _page(request, state.runs_of(request[_TENANT]))
    return _json({"training_runs": [_run(state, one) for one in runs], "cursor": cursor})


@routes.get(_PREFIX + "/training_runs/{run}")
async def training_run(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    return _json(_run(state, state.run_of(request.match_info["run"], request[_TENANT])))


@routes.get(_PREFIX + "/training_runs/{run}/checkpoints")
async def checkpoints_of_run(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    run = state.run_of(request.match_info["run"], request[_TENANT])
    return _json({"checkpoints": _checkpoints(state, run["model"])})


@routes.get(_PREFIX + "/checkpoints")
async def checkpoints(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    runs = state.runs_of(request[_TENANT])
    found, cursor = _page(
        request, [one for run in runs for one in _checkpoints(state, run["model"])]
    )
    return _json({"checkpoints": found, "cursor": cursor})


def _folder(request: web.Request) -> Path:
    match = request.match_info
    path = f"tinker://{match['run']}/{match['kind']}/{match['name']}"
    return request.app[_STATE].weights_of(path, request[_TENANT])


_CHECKPOINT = _PREFIX + "/training_runs/{run}/checkpoints/{kind}/{name}"


@routes.delete(_CHECKPOINT)
async def delete_checkpoint(request: web.Request) -> web.Response:
    request.app[_STATE].delete(_folder(request))
    return web.Response(status=204)


@routes.get(_CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(request: web.Request) -> web.Response:
    folder = _folder(request)
    root = request.app[_STATE].trainer.root
    until = int(time.time()) + LINK_SECONDS
    urls = {}
    for file in sorted(folder.iterdir()):
        if not file.name.startswith("."):
            path = file.relative_to(root).as_posix()
            sign = _signature(request.app[_SECRET], path, until)
            urls[file.name] = (
                f"{request.scheme}://{request.host}{_PREFIX}/files/{until}/{sign}/{path}"
            )
    expires = datetime.now(UTC) + timedelta(seconds=LINK_SECONDS)
    return _json({"urls": urls, "expires": expires.isoformat()})


def _signature(secret: bytes, path: str, until: int) -> str:
    return hmac.new(secret, f"{until}/{path}".encode(), hashlib.sha256).hexdigest()


@routes.get(_PREFIX + "/files/{until:[0-9]+}/{sign}/{path:.+}")
async def file(request: web.Request) -> web.StreamResponse:
    """Send a file of an address that :func:`external_weights_urls` has signed."""
    match = request.match_info
    until = int(match["until"])
    right = _signature(request.app[_SECRET], match["path"], until)
    if not hmac.compare_digest(right.encode(), match["sign"].encode()) or until < time.time():
        raise Unknown("the address of the file is wrong, or its time is over")
    path = request.app[_STATE].trainer.root / match["path"]
    if not path.is_file():
        raise Unknown("the file was deleted")
    return web.FileResponse(path)


@_post("/weights_info")
async def weights_info(state: State, tenant: str, body: dict[str, Any]) -> Any:
    path = str(body["tinker_path"])
    state.weights_of(path, tenant)
    run = state.run_of(path.removeprefix("tinker://").partition("/")[0], tenant)
    parts = {"train_unembed": False, "train_mlp": True, "train_attn": True}
    return {"base_model": base_name(state), "is_lora": True, "lora_rank": run["rank"], **parts}


@routes.get(_PREFIX + "/sessions")
async def sessions(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    mine = [name for name, one in state.sessions.items() if one["tenant"] == request[_TENANT]]
    return _json({"sessions": _page(request, mine[::-1])[0]})


@routes.get(_PREFIX + "/sessions/{name}")
async def session(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    found = state.session_of(request.match_info["name"], request[_TENANT])
    start = f"{found['id']}:"
    return _json(
        {
            "training_run_ids": [
                run["model"]
                for run in state.runs_of(request[_TENANT])
                if run["model"].startswith(start)
            ],
            "sampler_ids": [name for name in state.samplers if name.startswith(start)],
            "user_metadata": found.get("metadata"),
        }
    )


@routes.get(_PREFIX + "/samplers/{name}")
async def sampler(request: web.Request) -> web.Response:
    state = request.app[_STATE]
    found = state.sampler_of(request.match_info["name"], request[_TENANT])
    base = base_name(state)
    return _json({"sampler_id": found.id, "base_model": base, "model_path": found.path})
