"""The agent API of older releases: a sandbox that keeps its files, and a coding agent in one that
works against the endpoint of a generate function.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from agent_parts import ScriptedEngine, arguments, make_tokenizer, save_model

from slime.agent.adapters.common import BaseAdapter
from slime.agent.aiohttp_threaded import ThreadedServer
from slime.agent.harness import Harness
from slime.agent.sandbox import (
    E2BSandbox,
    Sandbox,
    SandboxUnavailable,
    exec_and_wait,
)
from slime.data.sample import Sample
from slime.plugins.compat.agent_api import Executed

pytestmark = pytest.mark.real


def unavailable() -> str:
    try:
        Sandbox()
    except SandboxUnavailable as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(unavailable()), reason="there are no namespaces here")
async def test_a_sandbox_keeps_its_files_and_ends_with_its_block() -> None:
    async with E2BSandbox(timeout=30, envs={"MINE": "a b"}) as sandbox:
        await sandbox.write_file("/sandbox/src/a.py", "print(1)\n")
        await sandbox.write_file("notes.txt", b"note")
        done = await sandbox.exec(
            'cat a.py > b.py && echo "$MINE $MORE" && pwd && exit 3',
            cwd="/sandbox/src",
            env={"MORE": "c"},
        )
        assert (done.exit_code, done.stdout.split("\n")[:2]) == (3, ["a b c", "/sandbox/src"])
        assert await sandbox.read_file("/sandbox/src/b.py") == "print(1)\n"
        assert (await sandbox.exec("cat notes.txt")).stdout == "note"
        await sandbox.write_file("large.txt", "x" * 200_000)
        assert len(await sandbox.read_file("large.txt")) == 200_000
        with pytest.raises(FileNotFoundError, match="absent"):
            await sandbox.read_file("absent")
        assert (await exec_and_wait(sandbox, "sleep 20", timeout=0.5)).exit_code == 124
    with pytest.raises(RuntimeError, match="not open"):
        await E2BSandbox().exec("true")


class HostSandbox(E2BSandbox):
    """Stands for a provider whose sandboxes have a network: a folder of this machine."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    async def exec(
        self,
        command: str,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Executed:
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", command],
            cwd=self.root,
            env={"PATH": "/usr/bin:/bin", **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Executed(done.returncode, done.stdout, done.stderr)


AGENT = """
import json, os, subprocess, sys, urllib.request
config = json.load(open("agent.json"))
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": config["model"], "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + config["key"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    run = subprocess.run(["bash", "-c", answer], capture_output=True, text=True)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": run.stdout or "done"}]
"""


class OwnHarness(Harness):
    program = "own-agent"
    install = "test -f agent.py"
    command = f"{sys.executable} agent.py {{prompt}}"
    config: Mapping[str, str] = {"agent.json": '{"key": "{api_key}", "model": "{model}"}'}


async def test_a_coding_agent_in_a_sandbox_becomes_samples(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    work = tmp_path / "work"
    work.mkdir()
    answers = ["cat task.txt", "echo 42 > answer.txt"]
    async with ScriptedEngine(make_tokenizer(), answers) as engine:
        adapter = BaseAdapter(
            tokenizer=engine.tokenizer,
            sglang_url=engine.url,
            args=arguments(tmp_path / "model", engine.url),
        )
        with ThreadedServer(adapter.app) as server:
            sid = adapter.open_session("s-1", sampling_defaults={"max_new_tokens": 50})
            async with HostSandbox(work) as sandbox:
                await sandbox.write_file("task.txt", "six times seven")
                await sandbox.write_file("agent.py", AGENT)
                done = await OwnHarness().run(
                    sandbox, "solve 'task.txt'", base_url=server.url, api_key=sid
                )
                assert done.exit_code == 0, done.stderr
                solved = (await sandbox.read_file("answer.txt")).strip() == "42"
            samples = await adapter.finish_session(
                sid, base_sample=Sample(index=3, prompt="p"), reward=float(solved)
            )
    (sample,) = samples
    assert sample.reward == 1.0 and sample.index == 3
    assert "six times seven" in engine.tokenizer.decode(sample.tokens)
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    assert sample.loss_mask is not None
    trained = [token for token, m in zip(response, sample.loss_mask, strict=True) if m]
    assert engine.tokenizer.decode(trained) == "".join(f"{answer}<|end|>" for answer in answers)


async def test_a_harness_that_cannot_be_installed_says_so(tmp_path: Path) -> None:
    async with HostSandbox(tmp_path) as sandbox:
        with pytest.raises(RuntimeError, match=r"'test -f agent\.py' ended with 1"):
            await OwnHarness().install_cli(sandbox)
