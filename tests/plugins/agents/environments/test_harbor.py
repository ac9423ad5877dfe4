"""``--environment harbor:…``: which tasks run, what the model can do, and what its reward is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.data.sample import Sample
from slime.plugins.agents.box import LIMITS, BoxProblem, LocalBox
from slime.plugins.agents.box_server import KEY, BoxServer
from slime.plugins.agents.environments import EnvironmentProblem, environment
from slime.plugins.agents.environments.harbor import LOGS, TESTS, Harbor, judge, read_rewards
from slime.plugins.agents.environments.harbor_tasks import HarborTask, read_tasks
from slime.plugins.agents.sandbox import SandboxUnavailable

TEST = "#!/bin/bash\ngrep -q done answer.txt && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"


def write_task(
    folder: Path, toml: str = "", dockerfile: str | None = None, test: str = TEST, **files: str
) -> Path:
    """A task whose tests want the word done in answer.txt."""
    every = {
        "instruction.md": "Write done into answer.txt.",
        "task.toml": toml,
        "tests/test.sh": test,
        "environment/answer.txt": "open\n",
        **files,
    }
    if dockerfile is not None:
        every["environment/Dockerfile"] = dockerfile
    for name, text in every.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


@pytest.fixture(autouse=True)
def sandbox(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("real"):
        try:
            LocalBox(LIMITS, ["/app"])
        except SandboxUnavailable as error:
            pytest.skip(str(error))


# --- what is read -------------------------------------------------------------------------------


def test_a_task_is_read_with_its_files_and_limits(tmp_path: Path) -> None:
    write_task(
        tmp_path / "b",
        "[metadata]\nneeds_image = false\n[agent]\ntimeout_sec = 9\n[verifier]\ntimeout_sec = 8\n"
        "env = {A = '1'}\n[environment]\nmemory_mb = 512\nstorage_mb = 99999\n",
        "FROM x\n# what follows\nWORKDIR /srv/app\nENV B=2 C='3 4'\nCOPY answer.txt \\\n  sub/\n"
        "COPY lib /data/lib\n",
        **{"environment/lib/x/y.py": "pass"},
    )
    write_task(tmp_path / "a")
    first, second = read_tasks(str(tmp_path), 0)
    assert first.name == "a" and first.folders == ("/app",)
    assert first.files() == {"/app/answer.txt": b"open\n"}
    assert first.agent_seconds is None and first.verifier_seconds == 600
    assert second.folders == ("/srv/app", "/srv/app/sub", "/data/lib")
    assert second.files() == {"/srv/app/sub/answer.txt": b"open\n", "/data/lib/x/y.py": b"pass"}
    assert second.environment == {"B": "2", "C": "3 4"}
    assert second.verifier_environment == {"A": "1"}
    assert (second.agent_seconds, second.verifier_seconds) == (9, 8)
    limits = second.limits(LIMITS, 5)
    assert (limits.memory_bytes, limits.disk_bytes, limits.seconds) == (512 << 20, 1 << 30, 5)
    assert second.tests()["/tests/test.sh"] == TEST.encode()
    assert [task.name for task in read_tasks(str(tmp_path), 1)] == ["a"]
    assert Harbor([first], "local", 60, "Be brief.").task(0).prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write done into answer.txt."},
    ]


FREE = "[metadata]\nneeds_image = false\n"


@pytest.mark.parametrize(
    ("toml", "dockerfile", "told"),
    [
        ("", "FROM python:3.11\n", "container image.*needs_image = false"),
        ("[environment]\ndocker_image = 'x'\n", None, "container image"),
        (FREE, "FROM x\nRUN pip install y\n", "RUN pip install y.*needs an image"),
        (FREE, "FROM x\nCOPY --from=y /a /b\n", "needs an image"),
        (FREE, "FROM x\nWORKDIR /usr/lib\n", "/usr/lib.*does not let it write"),
        ("[environment]\nnetwork_mode = 'public'\n", None, "network_mode = 'public'"),
        ("[environment]\nallow_internet = true\n", None, "needs the network"),
        ("[environment]\nos = 'windows'\n", None, "only linux"),
        ("[environment]\ngpus = 1\n", None, "needs GPUs"),
        ("[[steps]]\nname = 'a'\n", None, "several steps"),
        ("[verifier]\nenvironment_mode = 'separate'\n", None, "only shared"),
        ("[environment]\nenv = {KEY = '${KEY}'}\n", None, "no variable of this machine"),
        ("[environment\n", None, "at line 1"),
    ],
)  # fmt: skip
def test_what_the_sandbox_cannot_do_is_refused_in_words(
    tmp_path: Path, toml: str, dockerfile: str | None, told: str
) -> None:
    write_task(tmp_path / "task", toml, dockerfile)
    with pytest.raises(EnvironmentProblem, match=f"(?s){tmp_path}/task: .*{told}"):
        environment(f"harbor:{tmp_path}")


def test_a_folder_without_tasks_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"neither .*task\.toml"):
        environment(f"harbor:{tmp_path}")


@pytest.mark.parametrize("way", ["link", "copy"])
def test_a_task_cannot_read_files_of_the_machine(tmp_path: Path, way: str) -> None:
    (tmp_path / "secret").write_text("secret")
    copy = "COPY ../../secret .\n" if way == "copy" else "COPY . .\n"
    write_task(tmp_path / "task", FREE, f"FROM x\n{copy}")
    if way == "link":
        os.symlink(tmp_path / "secret", tmp_path / "task" / "environment" / "notes")
    (task,) = read_tasks(str(tmp_path / "task"), 0)
    with pytest.raises(EnvironmentProblem, match="leads out of"):
        task.files()


def test_rewards_are_those_of_harbors_files() -> None:
    def read(**files: str) -> Any:
        return read_rewards({f"{LOGS}/reward.{kind}": t.encode() for kind, t in files.items()})

    assert read() is None
    assert read(txt=" 0.5\n") == 0.5
    assert read(json='{"reward": 1}', txt="0") == 1.0, "reward.json counts first"
    assert read(json="0.25") == 0.25
    assert read(json='{"tests": 1, "style": 0.5}') == {"tests": 1, "style": 0.5}
    for bad in ({"txt": ""}, {"txt": "nan"}, {"json": '{"reward": "1"}'}, {"json": "1e999"}):
        with pytest.raises(ValueError, match=r"float|finite"):
            read(**bad)


# --- episodes -----------------------------------------------------------------------------------


@pytest.mark.real
async def test_the_model_works_in_the_shell_and_the_tests_judge(
    play_program: Any, tmp_path: Path
) -> None:
    spec = f"harbor:{write_task(tmp_path / 'task')}"
    says = [bash("cat answer.txt; exit 2"), bash("echo done > answer.txt"), "I wrote it."]
    sample, asked = await play_program(spec, says)
    assert sample.reward == 1.0 and sample.status is Sample.Status.COMPLETED
    assert "[bash ]" in asked[0] and "<|tool|> open\n\nexit status 2<|end|>" in asked[1]
    assert sample.metadata["task"] == "task"
    sample, _ = await play_program(spec, ["It is done."])
    assert sample.reward == 0.0, "each episode has files of its own"


@pytest.mark.real
async def test_commands_run_in_the_box_of_a_server(
    play_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret")
    runner = web.AppRunner(BoxServer("secret", most=1).app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    spec = f"harbor:{write_task(tmp_path / 'task')}?sandbox={url}"
    says = [bash("echo done > answer.txt"), "I wrote it."]
    for _ in range(2):  # the only box of the server was given back
        assert (await play_program(spec, says))[0].reward == 1.0
    await runner.cleanup()
    sample, _ = await play_program(spec, says)
    assert sample.reward is None and url in sample.metadata["reward_failure"]


@pytest.mark.real
async def test_mistakes_in_calls_are_told_to_the_model(play_program: Any, tmp_path: Path) -> None:
    spec = f"harbor:{write_task(tmp_path / 'task')}?seconds=0.5"
    calls = [
        '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>',
        bash("sleep 30"),
        bash("yes | head -c 50000"),
    ]
    sample, asked = await play_program(spec, [*calls, "Enough."])
    assert sample.reward == 0.0
    assert "there is no tool 'python'" in asked[1] and "the arguments are not" in asked[2]
    assert "killed after 0.5 s" in asked[3] and "[...]" in asked[4]


@pytest.mark.real
async def test_the_time_of_a_task_ends_its_conversation_and_is_judged(
    play_program: Any, tmp_path: Path
) -> None:
    spec = f"harbor:{write_task(tmp_path / 'task', '[agent]' + chr(10) + 'timeout_sec = 3')}"
    sample, _ = await play_program(spec, [bash("echo done > answer.txt"), bash("sleep 60")])
    assert sample.reward == 1.0


@pytest.mark.real
async def test_tests_without_a_reward_leave_the_sample_out(
    play_program: Any, tmp_path: Path
) -> None:
    spec = f"harbor:{write_task(tmp_path / 'task', test='#!/bin/bash' + chr(10) + 'no-such')}"
    sample, _ = await play_program(spec, ["Well."])
    assert sample.reward is None and sample.status is Sample.Status.FAILED
    assert "no-such: command not found" in sample.metadata["reward_failure"]


# --- models and tasks that mean no good -----------------------------------------------------------

FAKES = {
    "reward": f"echo 1 > {LOGS}/reward.txt; echo 1 > {LOGS}/reward.json",
    "tests": f"printf '#!/bin/bash\\necho 1 > {LOGS}/reward.txt' > {TESTS}/test.sh; ls {TESTS}",
    "folder": f"mkdir -p {LOGS}/reward.txt/x {TESTS}/test.sh/x; chmod 0 {LOGS}/reward.txt",
    "process": f"setsid bash -c 'while true; do echo 1 > {LOGS}/reward.json; done' &",
    "shell": f"echo 'echo 1 > {LOGS}/reward.json' > ~/.bashrc; cp ~/.bashrc ~/.profile",
    "programs": "mkdir -p ~/bin; printf '#!/bin/sh\\nexit 0' > ~/bin/grep; chmod +x ~/bin/grep",
    "grep": "alias grep=true; grep() { true; }; export -f grep",
}


@pytest.mark.real
@pytest.mark.parametrize("way", FAKES)
async def test_a_model_cannot_write_its_reward(play_program: Any, tmp_path: Path, way: str) -> None:
    sample, _ = await play_program(
        f"harbor:{write_task(tmp_path / 'task')}", [bash(FAKES[way]), "."]
    )
    assert sample.reward == 0.0


@pytest.mark.real
@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import os; os.kill(-1, 9)",
        "import os; os.kill(os.getppid(), 9)",
    ],
)
async def test_files_that_end_the_tests_give_no_reward(
    play_program: Any, tmp_path: Path, code: str
) -> None:
    """The tests import what the model wrote, as many do."""
    test = f"#!/bin/bash\npython3 answer.py && echo 1 > {LOGS}/reward.txt\n"
    task = write_task(tmp_path / "task", "[verifier]\ntimeout_sec = 2", test=test)
    says = [bash(f"echo '{code}' > answer.py"), "There."]
    sample, _ = await play_program(f"harbor:{task}", says)
    assert sample.reward == 0.0


@pytest.mark.real
async def test_a_task_reaches_nothing_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("secret")
    test = (
        f"#!/bin/bash\necho stolen > {tmp_path}/mine; cat {tmp_path}/mine; echo x > /etc/x\n"
        "python3 -c 'import socket; socket.socket()' 2>&1 | tail -n 1\n"
    )
    (task,) = read_tasks(str(write_task(tmp_path / "task", test=test)), 0)
    with pytest.raises(BoxProblem) as told:
        await judge(_box(task), task)
    assert "secret" not in str(told.value) and "Permission denied" in str(told.value)
    assert "Operation not permitted" in str(told.value), "there are no sockets"
    assert (tmp_path / "mine").read_text() == "secret"


@pytest.mark.real
async def test_a_task_that_does_not_end_is_killed(tmp_path: Path) -> None:
    test = f"#!/bin/bash\necho 1 > {LOGS}/reward.txt\nsleep 600\n"
    toml = "[verifier]\ntimeout_sec = 0.5"
    (task,) = read_tasks(str(write_task(tmp_path / "task", toml, test=test)), 0)
    assert await judge(_box(task), task) == 0.0


def _box(task: HarborTask) -> LocalBox:
    return LocalBox(task.limits(LIMITS, task.verifier_seconds), task.folders, (LOGS, TESTS))
