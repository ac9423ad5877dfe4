"""The keys of a run: who gets them, and that no server answers without."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_parts import engine_settings
from make_args import make_args, rule_problems

from slime.engines import keys as module
from slime.engines.handle import EngineHandle
from slime.engines.http import HttpError, get, post, request_blocking
from slime.engines.keys import (
    NO_KEYS,
    RunKeys,
    ServerKeys,
    auth_headers,
    control_key,
    send_key,
    worker_key,
)
from slime.engines.launch import EngineSettings, EngineSpec, RouterSettings, start_engine
from slime.engines.process import EngineProcess
from slime.engines.router import RouterProcess, start_router
from slime.plugins.embedded import app, routes_generate, routes_openai, routes_weights
from slime.plugins.sglang.options import check_keys
from slime.utils.async_utils import run

ROUTES = [
    (route.method, route.path)
    for part in (app, routes_generate, routes_openai, routes_weights)
    for route in part.routes  # type: ignore[attr-defined]
    if route.path != "/health"
]
ROUTER_ROUTES = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
]
ROUTER_ROUTES += [("POST", "/flush_cache"), ("GET", "/get_loads"), ("DELETE", "/workers/1")]


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "keys_by_address", {})


def test_each_run_has_a_key_of_its_own() -> None:
    first, second = RunKeys.of({}, {}), RunKeys.of({}, {})
    assert (
        first.engine.api and len(first.engine.api) >= 40 and first.engine.api != second.engine.api
    )
    assert first.router.api == first.engine.api, (
        "a router forwards the client's key to prefill and decode servers"
    )
    assert first.external_router == NO_KEYS, (
        "no server that the run did not start gets the run's key"
    )


def test_keys_of_the_user_are_used_instead() -> None:
    both = RunKeys.of({"api_key": "e"}, {"api_key": "r"})
    assert (both.engine.api, both.router.api, both.external_router.api) == ("e", "r", "r")
    admin = RunKeys.of({"admin_api_key": "a"}, {}).engine
    assert admin.for_path("/generate") == admin.api != "a" == admin.for_path("/pause_generation")
    only = RunKeys.of({}, {"api_key": "r"})
    assert only.engine.api == only.router.api == "r"
    entries = ["1:me too:user:u", "2:me:admin:c:d"]
    control = RunKeys.of({}, {"control_plane_api_keys": entries})
    assert (
        control.router.for_path("/workers/7") == "c:d"
        and control.router.for_path("/generate") == control.router.api
    )


def test_external_engines_get_only_the_keys_of_the_user() -> None:
    without = RunKeys.of({}, {}, external=True)
    assert without.engine == NO_KEYS and without.router.api, "only the router is the run's own"
    given = RunKeys.of({"api_key": "e"}, {}, external=True)
    assert given.engine.api == "e"


def test_a_key_goes_only_to_the_servers_that_have_it() -> None:
    send_key("http://127.0.0.1:4000", ServerKeys("k", "a"))
    assert auth_headers("http://127.0.0.1:4000/generate?x=1") == {"Authorization": "Bearer k"}
    assert auth_headers("http://127.0.0.1:4000/pause_generation") == {"Authorization": "Bearer a"}
    assert auth_headers("http://127.0.0.1:4000") == {"Authorization": "Bearer k"}
    for other in (
        "http://127.0.0.1:4001/generate",
        "http://evil.example/127.0.0.1:4000",
        "http://127.0.0.1:4000/health",
    ):
        assert auth_headers(other) == {}
    assert (
        worker_key("http://127.0.0.1:4000") == "k" and worker_key("http://127.0.0.1:4001") is None
    )
    send_key("http://127.0.0.1:4002", NO_KEYS)
    assert worker_key("http://127.0.0.1:4002") == "", (
        "an external engine does not get the key that its router asks for"
    )
    EngineHandle("http://127.0.0.1:4001/", keys=ServerKeys("other"))
    assert auth_headers("http://127.0.0.1:4001/generate") == {"Authorization": "Bearer other"}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "k",
        "Basic k",
        "Bearer k k",
        "Bearer \udce9",
        "Bearer K",
    ],
)
def test_only_the_whole_key_is_admitted(header: str) -> None:
    keys = ServerKeys("k")
    assert not keys.admits("/generate", header) and keys.admits("/health", header)
    assert keys.admits("/generate", "Bearer k") and keys.admits("/generate", "bearer k")
    assert NO_KEYS.admits("/generate", header)
    assert not ServerKeys("k", "a").admits("/flush_cache", "Bearer k")


def test_keys_are_neither_printed_nor_on_a_command_line() -> None:
    args = make_args(
        sglang={"api_key": "sesame"}, router={"api_key": "sesame"}, rollout_backend="sglang"
    )
    keys = RunKeys.of(args.sglang, args.router)
    engine, router = (
        EngineSettings.from_args(args, keys.engine),
        RouterSettings.of(args, args.router, keys),
    )
    assert pickle.loads(pickle.dumps(engine)).keys.api == router.keys.api == "sesame"
    assert "sesame" not in repr((keys, engine, router, router.words))
    from slime.plugins.sglang.launch import ServerPlace, server_words

    assert "sesame" not in " ".join(
        server_words(engine, EngineSpec(0, "m"), ServerPlace("127.0.0.1", 1))
    )


def test_the_log_of_sglang_has_no_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from slime.plugins.sglang.server import hide_in_logs

    # restored after the test
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    hide_in_logs(["sesame", "open"])
    log = logging.getLogger("a server")
    log.warning("args=%s at %d%%", {"api_key": "sesame", "admin": "open"}, 5)
    log.warning("plain 100%")
    assert caplog.messages == ["args={'api_key': '***', 'admin': '***'} at 5%", "plain 100%"]


def test_a_server_removes_the_keys_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.plugins.sglang.server import add_keys

    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    for keys, words in (
        (ServerKeys("k", "a"), ["p", "--api-key=k", "--admin-api-key=a"]),
        (ServerKeys("-k"), ["p", "--api-key=-k"]),
        (NO_KEYS, ["p"]),
    ):
        for name, value in keys.environment().items():
            monkeypatch.setenv(name, value)
        found = ["p"]
        add_keys(found)
        assert found == words and not [
            name for name in os.environ if name.startswith("SLIME_SERVER_")
        ]


def test_the_first_key_of_an_administrator_is_used() -> None:
    assert (
        control_key({"control_plane_api_keys": ["a:b:user:c", "a:b:admin:d", "a:b:admin:e"]}) == "d"
    )
    assert control_key({"control_plane_api_keys": ["nonsense"]}) is None and control_key({}) is None


def test_a_router_and_a_pair_of_servers_behind_it_have_one_key() -> None:
    def problems(engine: str, router: str, prefill: int | None) -> list[str]:
        given = {
            "sglang": {"api_key": engine},
            "router": {"api_key": router},
            "rollout_backend": "sglang",
        }
        args = make_args(**given, prefill_num_servers=prefill, rollout_num_gpus=2)
        return [problem for problem in rule_problems(args) if "--router-api-key" in problem]

    assert problems("a", "b", 1) and not problems("a", "a", 1) and not problems("a", "b", None)


def test_servers_that_cannot_have_a_key_are_started_without_and_told() -> None:
    from slime.plugins.sglang.launch import takes_keys

    args = make_args(sglang={"tokenizer_worker_num": 2}, rollout_backend="sglang")
    assert not check_keys(args) and "--sglang-tokenizer-worker-num" in " ".join(args.notices)
    settings = EngineSettings.from_args(args, ServerKeys("k"))
    assert not takes_keys(settings, EngineSpec(0, "m"))
    assert takes_keys(EngineSettings("m"), EngineSpec(0, "m"))
    assert not takes_keys(EngineSettings("m"), EngineSpec(0, "m", options={"grpc_port": 5}))


@pytest.fixture(scope="module")
def two_runs(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[Any, Any, RunKeys]]]:
    """Engine, router and keys of two runs, each with logs in a folder of its own."""
    runs: list[tuple[EngineProcess, RouterProcess, RunKeys]] = []
    started: list[EngineProcess | RouterProcess] = []
    try:
        for _ in range(2):
            logs, keys = tmp_path_factory.mktemp("run"), RunKeys.of({}, {})
            settings = engine_settings(tiny_llama, keys=keys.engine)
            engine = start_engine(
                settings, EngineSpec(0, str(tiny_llama)), log_path=logs / "engine.log"
            )
            started.append(engine)
            engine.wait_ready(300)
            router_settings = RouterSettings(options={"log_level": "debug"}, keys=keys.router)
            router = start_router(router_settings, [engine.url], log_path=logs / "router.log")
            started.append(router)
            runs.append((engine, router, keys))
        yield runs
    finally:
        for process in started:
            process.stop()


def status(method: str, url: str, key: str | None) -> int:
    """Send one request without the HTTP client's own keys."""
    send_key(url, ServerKeys(key))
    return request_blocking(method, url, {} if method == "POST" else None, timeout=30)[0]


@pytest.mark.real
@pytest.mark.parametrize("server", ["engine", "router"])
def test_every_request_without_the_key_of_the_run_is_refused(two_runs: Any, server: str) -> None:
    (engine, router, _), (*_, others) = two_runs
    url, routes = (engine.url, ROUTES) if server == "engine" else (router.url, ROUTER_ROUTES)
    for key in (None, "wrong", others.engine.api):
        assert {route: status(route[0], url + route[1], key) for route in routes} == dict.fromkeys(
            routes, 401
        )
    assert status("GET", f"{url}/health", None) == 200


@pytest.mark.real
def test_requests_with_the_key_work_and_two_runs_are_apart(two_runs: Any) -> None:
    (engine, router, keys), (other, other_router, others) = two_runs
    send_key(engine.url, keys.engine)
    send_key(router.url, keys.router)
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert run(post(f"{router.url}/generate", body))["meta_info"]["completion_tokens"] == 2
    handle = EngineHandle(engine.url)
    assert run(handle.health())
    run(handle.pause("abort"))
    run(handle.continue_generation())
    (listed,) = run(get(f"{router.url}/workers"))["workers"]
    assert "api_key" not in listed
    send_key(other_router.url, keys.router)
    with pytest.raises(HttpError, match="401") as refused:
        run(post(f"{other_router.url}/workers", {"url": engine.url}))
    assert not refused.value.retryable
    assert others.engine.api != keys.engine.api and other.alive()


@pytest.mark.real
def test_a_router_has_the_keys_of_the_user(two_runs: Any, tmp_path: Path) -> None:
    """One for requests and one for the registration of engines; the engine behind it has a third
    one.
    """
    engine, _, keys = two_runs[0]
    send_key(engine.url, keys.engine)
    given = {
        "api_key": "requests",
        "control_plane_api_keys": ["1:me:user:u", "2:me:admin:control", "3:my tool:admin:other"],
    }
    settings = RouterSettings.of(make_args(), given, RunKeys.of({}, given))
    router = start_router(settings, [engine.url], log_path=tmp_path / "router.log")
    try:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        assert run(post(f"{router.url}/generate", body))["meta_info"]["completion_tokens"] == 2
        assert [worker["url"] for worker in router.workers()] == [engine.url]
        assert {
            key: status("GET", f"{router.url}/workers", key) for key in ("requests", "u", "other")
        } == {
            "requests": 401,
            "u": 403,
            "other": 200,
        }
        assert status("POST", f"{router.url}/generate", keys.engine.api) == 401
    finally:
        router.stop()


@pytest.mark.real
def test_other_users_of_the_machine_do_not_see_the_key(two_runs: Any) -> None:
    for engine, router, keys in two_runs:
        processes = [psutil.Process(engine.pid), psutil.Process(router.pid)]
        processes += [child for process in processes for child in process.children(recursive=True)]
        words = [word for process in processes for word in process.cmdline()]
        assert len(words) > 20 and not [word for word in words if keys.engine.api in word]
        for file in engine.log_path.parent.iterdir():
            assert keys.engine.api not in file.read_text()
        hosts = {
            c.laddr.ip
            for process in processes
            for c in process.net_connections("tcp")
            if c.status == "LISTEN"
        }
        assert hosts == {"127.0.0.1"}
