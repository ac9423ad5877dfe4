"""Sandboxes that keep files: the local one, and the same behind HTTP, with commands that mean no
good.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from slime.plugins.agents import box_server
from slime.plugins.agents.box import LIMITS, Box, BoxProblem, LocalBox
from slime.plugins.agents.box_server import KEY, BoxServer, HttpBox
from slime.plugins.agents.environments.harbor import open_box
from slime.plugins.agents.sandbox import SandboxUnavailable

pytestmark = [pytest.mark.real]
SMALL = replace(LIMITS, disk_bytes=4 << 20, memory_bytes=512 << 20, output_bytes=2000)


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setenv(KEY, "secret")
    runner = web.AppRunner(BoxServer("secret", most=2).app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture(params=["local", "http"])
async def box(request: pytest.FixtureRequest, server: str) -> AsyncIterator[Box]:
    """One contract for both."""
    try:
        where = server if request.param == "http" else "local"
        made = open_box(where, SMALL, ["/app"], ["/logs"])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def test_files_go_in_stay_and_come_out(box: Box) -> None:
    ran = await box.run(
        "pwd; cat a/b.txt; echo $WORD; echo new > c; echo gone > /tmp/x; echo gone > /logs/x",
        10,
        put={"/app/a/b.txt": b"hello\n"},
        get=["/app/c", "/logs/x", "/app/none", "/app/a"],
        environment={"WORD": "here"},
    )
    assert ran.result.ok and ran.result.stdout == "/app\nhello\nhere\n"
    assert ran.files == {
        "/app/c": b"new\n",
        "/logs/x": b"gone\n",
        "/app/none": None,
        "/app/a": None,
    }
    ran = await box.run("ls /app; cat /tmp/x /logs/x; exit 3", 10)
    assert (ran.result.status, ran.result.exit_code, ran.result.stdout) == ("error", 3, "a\nc\n")


async def test_a_command_reaches_nothing_of_the_machine(box: Box, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    ran = await box.run(
        f"cat {tmp_path}/secret; echo x > {tmp_path}/new; echo x > /etc/new; echo x > /usr/new; "
        "env | grep -i -c KEY; ls / | grep -c home",
        10,
    )
    assert not ran.result.ok and ran.result.stdout == "0\n0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


async def test_a_command_has_no_network(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.01)
        port = listening.getsockname()[1]
        ran = await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", 10)
        assert not ran.result.ok
        with pytest.raises(TimeoutError):
            listening.accept()


async def test_time_output_disk_and_processes_are_bounded(box: Box) -> None:
    await box.run("echo 1 > kept", 10)
    ran = await box.run("echo begun; sleep 60", 0.5)
    assert ran.result.status == "timeout" and ran.result.stdout == "begun\n"
    ran = await box.run("yes | head -c 100000", 10)
    assert ran.result.ok and len(ran.result.stdout) == SMALL.output_bytes
    ran = await box.run("head -c 50000000 /dev/zero > large", 10)
    assert not ran.result.ok
    ran = await box.run("for i in 1 2 3; do truncate -s 3M hole$i; done", 10)
    assert not ran.result.ok and "could not be kept" in ran.result.stderr
    ran = await box.run("for i in $(seq 500); do sleep 30 & done; wait", 5)
    assert not ran.result.ok
    ran = await box.run("kill -9 -1", 10)
    assert ran.result.status == "killed"
    assert (await box.run("cat kept", 10)).result.stdout == "1\n", "the box is as before all that"


async def test_no_process_outlives_its_command(box: Box) -> None:
    loop = "setsid bash -c 'while true; do date +%N > /app/written; done' > /dev/null 2>&1 &"
    await box.run(f"{loop} sleep 0.2", 10)
    first = (await box.run("cat written", 10)).result.stdout
    assert (await box.run("sleep 0.2; cat written", 10)).result.stdout == first


async def test_links_and_pipes_in_a_box_do_no_harm(box: Box) -> None:
    await box.run(
        "ln -s /etc/passwd link; mkfifo pipe; ln -s / root; mkdir -p d; ln -s .. d/up", 10
    )
    ran = await box.run(
        "ls", 10, get=["/app/link", "/app/pipe", "/dev/zero", "/app/root/etc/shadow"]
    )
    assert ran.result.stdout == "d\nlink\npipe\nroot\n"
    assert set(ran.files.values()) == {None}


async def test_the_server_refuses_strangers_and_what_is_too_much(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(key: str, path: str, body: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(server + path, json=body) as response,
        ):
            assert "error" in await response.json() or response.status == 200
            return response.status

    new: dict[str, Any] = {"limits": {}, "folders": ["/app"], "scratch": []}
    run: dict[str, Any] = {"command": "true", "seconds": 5, "put": {}, "get": [], "environment": {}}
    assert await ask("guess", "/boxes", new) == 401
    assert await ask("secret", "/boxes", {"limits": {}}) == 400
    assert await ask("secret", "/boxes", {**new, "folders": ["../app"]}) == 400
    assert await ask("secret", "/boxes", {**new, "limits": {"seconds": "long"}}) == 400
    assert await ask("secret", "/boxes/none", run) == 404
    assert [await ask("secret", "/boxes", new) for _ in range(3)] == [200, 200, 429]
    with pytest.raises(BoxProblem, match="429"):
        await HttpBox(server, SMALL, ["/app"]).run("true", 5)
    monkeypatch.setattr(box_server, "BODY_BYTES", 10)
    with pytest.raises(BoxProblem, match="too large"):
        await HttpBox(server, SMALL, ["/app"]).run("true", 5)


async def test_a_server_lends_no_more_than_its_own_limits(server: str) -> None:
    box = HttpBox(server, replace(LIMITS, disk_bytes=1 << 40, tasks=10**6), ["/app"])
    ran = await box.run("ulimit -f; ulimit -u", 10)
    blocks = LIMITS.disk_bytes >> 10
    assert ran.result.stdout.split() == [str(blocks), str(LIMITS.tasks + 2)]
    await box.close()


async def test_a_server_that_is_not_there_is_a_problem_of_the_box() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(BoxProblem, match=f"127.0.0.1:{port}"):
        await HttpBox(f"http://127.0.0.1:{port}", SMALL, ["/app"]).run("true", 5)


async def test_a_class_of_the_users_is_a_box(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime.plugins.agents.box import LocalBox\n\nclass Mine(LocalBox):\n    pass\n"
    )
    made = open_box(f"{file}:Mine", SMALL, ["/app"])
    assert type(made).__name__ == "Mine" and isinstance(made, LocalBox)
    assert made.folders == ("/app",) and made.limits == SMALL


def test_the_server_does_not_start_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setattr("sys.argv", ["box_server", "--port", "1"])
    with pytest.raises(SystemExit):
        box_server.main()
    assert KEY in capsys.readouterr().err
