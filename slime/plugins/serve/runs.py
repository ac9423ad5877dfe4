"""The routes that look at sessions, training runs and checkpoints, and send files; and what all routes
share: who may ask, the keys of the application, bodies, answers.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from slime.plugins.http.server import BadRequest, Refused, body_of, json_answer
from slime.plugins.serve.log import Record
from slime.plugins.serve.state import State, Unknown

PREFIX = "/api/v1"
STATE_KEY = web.AppKey("state", State)
SECRET = web.AppKey("secret", bytes)
"""Signs the addresses of files."""
TENANT = web.RequestKey("tenant", str)


def base_name(state: State) -> str:
    """Return the name of the base model: the folder or the hub id that the server was given."""
    return str(state.args.hf_checkpoint)


def tenants(keys: dict[str, str]) -> Middleware:
    """Return a middleware that refuses requests without a tenant's key, and notes the tenant."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-API-Key", "").encode(errors="surrogateescape")
        tenant = ""
        for name, key in keys.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, key.encode()):
                tenant = name
        open_paths = (f"{PREFIX}/healthz", f"{PREFIX}/files/")
        if not tenant and not request.path.startswith(open_paths):
            raise Refused("X-API-Key is not the key of a tenant of this server", 401)
        request[TENANT] = tenant
        return await handler(request)

    return check


LINK_SECONDS = 3600
routes = web.RouteTableDef()


# --- runs and checkpoints ------------------------------------------------------------------------


def _page(request: web.Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (int(request.query.get(name, default)) for name, default in
                     (("limit", 20), ("offset", 0)))  # fmt: skip
    if limit < 0 or offset < 0:
        raise BadRequest("limit and offset must not be negative")
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor


def _run(state: State, record: Record) -> dict[str, Any]:
    checkpoints = _checkpoints(state, record["model"])
    by_kind = {one["checkpoint_type"]: one for one in checkpoints}
    return {
        "training_run_id": record["model"],
        "base_model": base_name(state),
        "model_owner": record["tenant"],
        "is_lora": record["rank"] > 0,
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


@routes.get(PREFIX + "/training_runs")
async def training_runs(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    runs, cursor = _page(request, state.runs_of(request[TENANT]))
    return json_answer({"training_runs": [_run(state, one) for one in runs], "cursor": cursor})


@routes.get(PREFIX + "/training_runs/{run}")
async def training_run(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    return json_answer(_run(state, state.run_of(request.match_info["run"], request[TENANT])))


@routes.get(PREFIX + "/training_runs/{run}/checkpoints")
async def checkpoints_of_run(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    run = state.run_of(request.match_info["run"], request[TENANT])
    return json_answer({"checkpoints": _checkpoints(state, run["model"])})


@routes.get(PREFIX + "/checkpoints")
async def checkpoints(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    runs = state.runs_of(request[TENANT])
    found, cursor = _page(
        request, [one for run in runs for one in _checkpoints(state, run["model"])]
    )
    return json_answer({"checkpoints": found, "cursor": cursor})


def _folder(request: web.Request) -> Path:
    match = request.match_info
    path = f"tinker://{match['run']}/{match['kind']}/{match['name']}"
    return request.app[STATE_KEY].weights_of(path, request[TENANT])


_CHECKPOINT = PREFIX + "/training_runs/{run}/checkpoints/{kind}/{name}"


@routes.delete(_CHECKPOINT)
async def delete_checkpoint(request: web.Request) -> web.Response:
    request.app[STATE_KEY].delete(_folder(request))
    return web.Response(status=204)


@routes.get(_CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(request: web.Request) -> web.Response:
    folder = _folder(request)
    root = request.app[STATE_KEY].trainer.root
    until = int(time.time()) + LINK_SECONDS
    urls = {}
    for file in sorted(folder.iterdir()):
        if not file.name.startswith("."):
            path = file.relative_to(root).as_posix()
            sign = _signature(request.app[SECRET], path, until)
            urls[file.name] = (
                f"{request.scheme}://{request.host}{PREFIX}/files/{until}/{sign}/{path}"
            )
    expires = datetime.now(UTC) + timedelta(seconds=LINK_SECONDS)
    return json_answer({"urls": urls, "expires": expires.isoformat()})


def _signature(secret: bytes, path: str, until: int) -> str:
    return hmac.new(secret, f"{until}/{path}".encode(), hashlib.sha256).hexdigest()


@routes.get(PREFIX + "/files/{until:[0-9]+}/{sign}/{path:.+}")
async def file(request: web.Request) -> web.StreamResponse:
    """Send a file of an address that :func:`external_weights_urls` has signed."""
    match = request.match_info
    until = int(match["until"])
    right = _signature(request.app[SECRET], match["path"], until)
    if not hmac.compare_digest(right.encode(), match["sign"].encode()) or until < time.time():
        raise Unknown("the address of the file is wrong, or its time is over")
    path = request.app[STATE_KEY].trainer.root / match["path"]
    if not path.is_file():
        raise Unknown("the file was deleted")
    return web.FileResponse(path)


@routes.post(PREFIX + "/weights_info")
async def weights_info(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    path = str((await body_of(request))["tinker_path"])
    state.weights_of(path, request[TENANT])
    run = state.run_of(path.removeprefix("tinker://").partition("/")[0], request[TENANT])
    parts = {"train_unembed": False, "train_mlp": True, "train_attn": True}
    known = {"base_model": base_name(state), "is_lora": run["rank"] > 0, "lora_rank": run["rank"]}
    return json_answer({**known, **parts})


@routes.get(PREFIX + "/sessions")
async def sessions(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    mine = [name for name, one in state.sessions.items() if one["tenant"] == request[TENANT]]
    return json_answer({"sessions": _page(request, mine[::-1])[0]})


@routes.get(PREFIX + "/sessions/{name}")
async def session(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    found = state.session_of(request.match_info["name"], request[TENANT])
    start = f"{found['id']}:"
    return json_answer(
        {
            "training_run_ids": [
                run["model"]
                for run in state.runs_of(request[TENANT])
                if run["model"].startswith(start)
            ],
            "sampler_ids": [name for name in state.samplers if name.startswith(start)],
            "user_metadata": found.get("metadata"),
        }
    )


@routes.get(PREFIX + "/samplers/{name}")
async def sampler(request: web.Request) -> web.Response:
    state = request.app[STATE_KEY]
    found = state.sampler_of(request.match_info["name"], request[TENANT])
    base = found.teacher or base_name(state)
    return json_answer({"sampler_id": found.id, "base_model": base, "model_path": found.path})
