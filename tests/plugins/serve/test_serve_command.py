"""``slime serve`` as a command: its options, and where it stops before anything is started."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from slime.cli.command import CommandError
from slime.cli.main import main

CHECKOUT = Path(__file__).resolve().parents[3]


def ask(port: int, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v1{path}", data, {"X-API-Key": key}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.real
@pytest.mark.slow
def test_options_reach_the_server(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(
        json.dumps({"alice": "tml-a", "bob": {"key": "tml-b", "models": 2, "tokens_per_minute": 4}})
    )
    override = tmp_path / "flags.yaml"
    override.write_text("embedded_max_total_tokens: 512\n")
    command = [sys.executable, "-m", "slime.cli.main", "serve", "--model", str(tiny_model)]
    command += ["--host", "127.0.0.1", "--port", "0", "--state", str(tmp_path / "state")]
    command += ["--keys", str(keys), "--max-models", "1", "--override", str(override)]
    command += ["--teacher", "big=http://127.0.0.1:1"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = None
            for line in process.stdout:
                if ready := re.match(r"ready: TINKER_BASE_URL=http://127.0.0.1:(\d+) ", line):
                    break
            assert ready is not None, "the server ended"
            port = int(ready[1])
            status, told = ask(port, "/get_server_capabilities", "tml-b")
            assert status == 200 and told["supported_models"][0]["max_context_length"] == 512
            assert told["supported_models"][1]["model_name"] == "big"
            assert ask(port, "/get_server_capabilities", "tml-c")[0] == 401
            session = ask(port, "/create_session", "tml-a", {"tags": []})[1]["session_id"]
            body = {
                "session_id": session,
                "base_model": str(tiny_model),
                "lora_config": {"rank": 2},
            }
            made = [
                ask(port, "/create_model", "tml-a", {**body, "model_seq_id": place})[0]
                for place in range(2)
            ]
            assert made == [200, 403]
            own = {**body, "session_id": ask(port, "/create_session", "tml-b", {})[1]["session_id"]}
            made = [
                ask(port, "/create_model", "tml-b", {**own, "model_seq_id": place})[0]
                for place in range(3)
            ]
            assert made == [200, 200, 403]
            assert (tmp_path / "state" / "log.jsonl").stat().st_mode & 0o77 == 0
            other = ("--port", str(port), "--state", str(tmp_path / "other"))
            with pytest.raises(CommandError, match="already in use"):
                run("--model", str(tiny_model), "--override", str(override), *other)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.mark.parametrize(
    "keys",
    [
        "{",
        "[]",
        "{}",
        '{"a": "secret"}',
        '{"a": "tml-x", "b": "tml-x"}',
        '{"a": 1}',
        '{"a": {"models": 1}}',
        '{"a": {"key": "tml-x", "modles": 1}}',
        '{"a": {"key": "tml-x", "disk_mb": 0}}',
        '{"a": {"key": "tml-x", "models": "2"}}',
    ],
)
def test_wrong_keys_are_told_before_anything_is_started(tmp_path: Path, keys: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(keys)
    with pytest.raises(CommandError, match="--keys"):
        run("--keys", str(file), "--state", str(tmp_path / "state"))


@pytest.mark.parametrize("teacher", ["http://127.0.0.1:1", "big=127.0.0.1:1", "=http://a"])
def test_a_wrong_teacher_is_told_before_anything_is_started(tmp_path: Path, teacher: str) -> None:
    with pytest.raises(CommandError, match="--teacher"):
        run("--teacher", teacher, "--state", str(tmp_path / "state"))


def test_a_busy_port_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(CommandError, match="already in use"):
            run("--port", port, "--state", str(tmp_path / "state"))


def test_a_wrong_flag_of_the_run_is_told_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("no_such_flag: 1\n")
    with pytest.raises(CommandError, match="no_such_flag"):
        run("--override", str(file), "--state", str(tmp_path / "state"))


def test_a_replay_needs_a_log(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="replay"):
        run("--replay", "--state", str(tmp_path))


def run(*options: str) -> None:
    import argparse

    from slime.plugins.serve.command import add_serve

    parser = argparse.ArgumentParser()
    add_serve(parser.add_subparsers())
    parsed = parser.parse_args(["serve", "--model", "none", *options])
    parsed.run(parsed)


def test_the_program_has_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0 and "TINKER_BASE_URL" in capsys.readouterr().out
