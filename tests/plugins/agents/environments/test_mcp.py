"""``--mcp-server`` with the real package and a real server, over stdio and over HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args, rule_problems
from scripted_engine import Script

from slime.data.sample import Sample
from slime.engines.http import HttpError
from slime.plugins.agents.config import MCP_GENERATE
from slime.plugins.agents.environments import EnvironmentProblem
from slime.plugins.agents.environments.mcp import check_servers, generate
from slime.plugins.agents.environments.source import check_environment

pytest.importorskip("mcp_types", reason="pip install 'slime-rl[mcp]'")
pytestmark = [pytest.mark.real]
SERVER = Path(__file__).with_name("mcp_tools.py")
COMMAND = f"{sys.executable} {SERVER}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><eos>"


async def talk(
    monkeypatch: pytest.MonkeyPatch, folder: Path, server: str, says: list[str], **flags: Any
) -> Any:
    script = Script(monkeypatch, folder, mcp_server=[server], **flags)
    script.says = says
    sample = Sample(prompt=[{"role": "user", "content": "Go."}], index=0, group_index=0)
    return await generate(script.args, sample, script.params), script


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(timeout=30)


async def test_calls_reach_a_command_and_errors_reach_the_model(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    says = [
        call("add", a=2, b=40),
        call("fail"),
        call("nothing"),
        call("add", a="x", b=1),
        "It is 42.<eos>",
    ]
    spoken = "".join(says)
    sample, script = await talk(monkeypatch, bytes_dir, COMMAND, says)
    assert '"name": "add"' in script.asked[0] and "Add two numbers." in script.asked[0]
    assert script.asked[1].endswith("<tool>42<eos><assistant>")
    assert "error: " in script.asked[2].rpartition("<tool>")[2] and "tool fail" in script.asked[2]
    assert script.asked[3].endswith(
        "<tool>error: there is no tool 'nothing'; there are add, count, fail, look, "
        "die<eos><assistant>"
    )
    assert "error: " in script.asked[4].rpartition("<tool>")[2], "arguments of the wrong type"
    assert (
        sample.status is Sample.Status.COMPLETED
        and sample.reward is None
        and not sample.reward_timed_out
    )
    assert script.trained(sample) == spoken, "results of tools have no loss"


async def test_a_server_in_the_sandbox_answers_and_has_no_way_out(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    try:
        check_servers([f"sandbox:{SERVER}"])
    except EnvironmentProblem as error:
        pytest.skip(str(error))
    _, script = await talk(monkeypatch, bytes_dir, COMMAND, [call("look"), "Done.<eos>"])
    assert "<tool>network, files, program, own folder, scratch<" in script.asked[1]
    says = [call("look"), call("count"), call("count"), call("die"), "x<eos>"]
    sample, script = await talk(monkeypatch, bytes_dir, f"sandbox:{SERVER}", says)
    assert "<tool>scratch<" in script.asked[1], "its own files in memory, and nothing else"
    assert "<tool>call 2<" in script.asked[3], "it lives as long as its sample"
    assert sample.remove_sample and "tool die" in sample.metadata["reward_failure"]


def test_a_program_for_the_sandbox_must_exist() -> None:
    for value in ("sandbox:", "sandbox:nowhere.py 3"):
        (problem,) = check_environment(make_args(mcp_server=[value], rm_type="f1"))
        assert f"--mcp-server: {value}: " in problem


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("no-such-program x.py", "'no-such-program'"),
        ("", "no program"),
        ("python 'x.py", "closing quotation"),
        ("sandbox:'x.py", "closing quotation"),
    ],
)
def test_a_command_that_cannot_be_started_is_told_before_the_run(value: str, told: str) -> None:
    assert (
        check_environment(make_args(mcp_server=[COMMAND, "http://127.0.0.1:1/mcp"], rm_type="f1"))
        == []
    )
    (problem,) = check_environment(make_args(mcp_server=[COMMAND, value], rm_type="f1"))
    assert told in problem


async def test_each_sample_has_a_server_of_its_own(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    for _ in range(2):
        _, script = await talk(
            monkeypatch, bytes_dir, COMMAND, [call("count"), call("count"), "Done.<eos>"]
        )
        assert "<tool>call 1<" in script.asked[1] and "<tool>call 2<" in script.asked[2]


async def test_a_continued_conversation_has_a_server_that_knows_the_calls_before(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    sample, _ = await talk(
        monkeypatch, bytes_dir, COMMAND, [call("count"), call("add", a=1, b=1), "I wasABORT"]
    )
    assert sample.status is Sample.Status.ABORTED
    script = Script(monkeypatch, bytes_dir, mcp_server=[COMMAND])
    script.says = [" there." + call("count"), "Done.<eos>"]
    await generate(script.args, sample, script.params)
    assert script.asked[0].endswith("I was") and "<tool>call 2<" in script.asked[1]
    assert sample.status is Sample.Status.COMPLETED


async def test_a_discarded_response_leaves_the_tools_in_the_prompt_once(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    """An abort discards the response of a sample whose server was lost, and the sample starts
    again.
    """
    for prompt in (
        [{"role": "user", "content": "Go."}],
        [{"role": "system", "content": "Be brief."}],
        "Go.",
    ):
        script = Script(monkeypatch, bytes_dir, mcp_server=[COMMAND])
        script.says = [call("die"), "Done.<eos>"]
        sample = Sample(prompt=prompt, index=0, group_index=0)
        await generate(script.args, sample, script.params)
        sample.reset_response()
        await generate(script.args, sample, script.params)
        assert script.asked[1] == script.asked[0] and script.asked[0].count("Add two numbers.") == 1


async def test_calls_reach_a_server_over_http(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path, url: str
) -> None:
    _, script = await talk(monkeypatch, bytes_dir, url, [call("add", a=1, b=1), "2<eos>"])
    assert script.asked[1].endswith("<tool>2<eos><assistant>")


async def test_a_server_may_list_its_tools_in_pages(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    command = f"{sys.executable} {SERVER.with_name('mcp_pages.py')}"
    _, script = await talk(monkeypatch, bytes_dir, command, [call("third"), "Done.<eos>"])
    assert all(f'"name": "{name}"' in script.asked[0] for name in ("first", "second", "third"))
    assert script.asked[1].endswith("<tool>I am third<eos><assistant>")


async def test_a_turn_on_which_the_parser_fails_has_no_calls(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import json\nclass Parser:\n    marks = ()\n    def parse(self, text):\n"
        "        return '', [{'id': '', 'type': 'function', 'function': json.loads(text)}]\n"
    )
    says = [json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}}) + "<eos>", "It is 3.<eos>"]
    spoken, parser = "".join(says), f"{tmp_path / 'mine.py'}:Parser"
    sample, script = await talk(monkeypatch, bytes_dir, COMMAND, says, agent_tool_parser=parser)
    assert script.asked[1].endswith("<tool>3<eos><assistant>")
    assert sample.status is Sample.Status.COMPLETED and script.trained(sample) == spoken


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("/nowhere/to/be/found", "FileNotFoundError: "),
        ("http://127.0.0.1:9/mcp", "ConnectError: "),
        ("/bin/false", "MCPError: Connection closed"),
    ],
)
async def test_a_server_that_cannot_be_reached_costs_its_sample_only(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path, server: str, reason: str
) -> None:
    sample, _ = await talk(monkeypatch, bytes_dir, server, [])
    assert (
        sample.remove_sample
        and f"--mcp-server {server}: {reason}" in sample.metadata["reward_failure"]
    )


async def test_a_server_that_dies_costs_its_sample_only(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    sample, _ = await talk(
        monkeypatch, bytes_dir, COMMAND, [call("die"), "x<eos>"], environment_timeout=20.0
    )
    assert sample.remove_sample and "tool die" in sample.metadata["reward_failure"]


def test_the_flag_selects_the_generate_function() -> None:
    args = make_args(mcp_server=["python tools.py"], rm_type="f1")
    assert args.custom_generate_function_path == MCP_GENERATE and check_environment(args) == []
    for more in (
        {"environment": "reasoning_gym:x"},
        {"custom_generate_function_path": "a.b"},
        {"apply_chat_template": True},
    ):
        problems = rule_problems(make_args(mcp_server=["x"], **more))  # type: ignore[arg-type]
        assert any("--mcp-server" in problem for problem in problems), more


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert (
        "pip install 'slime-rl[mcp]'"
        in check_environment(make_args(mcp_server=["x"], rm_type="f1"))[0]
    )


async def test_an_error_of_an_engine_is_raised_as_it_is(
    monkeypatch: pytest.MonkeyPatch, bytes_dir: Path
) -> None:
    script = Script(monkeypatch, bytes_dir, mcp_server=[COMMAND])

    async def refuse(*_: object) -> None:
        raise HttpError("refused", 422)

    monkeypatch.setattr("slime.rollout.generate.ask_engine", refuse)
    sample = Sample(prompt="Go.", index=0, group_index=0)
    with pytest.raises(HttpError):
        await generate(script.args, sample, script.params)
