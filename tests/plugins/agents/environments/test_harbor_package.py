"""``--environment 'harbor:…?program=…'``: a program in the package's place, and the package itself
where it is installed (``HARBOR_PROGRAM``, the path of its command).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.plugins.agents.environments import EnvironmentProblem, environment
from slime.plugins.agents.environments.harbor import reward_of_trial

FAKE = '''#!{python}
"""Asks the model once, and writes the result of a trial as the package does."""
import json, os, pathlib, sys, urllib.request

if sys.argv[1:] == ["--version"]:
    sys.exit({status})
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert sys.argv[1:3] == ["trial", "start"] and pathlib.Path(options["--path"], "task.toml").exists()
assert "SECRET_KEY" not in os.environ
body = dict(model=options["--model"], messages=[dict(role="user", content="Fix it.")])
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if said == "crash":
    sys.exit("no container")
folder = pathlib.Path(options["--trials-dir"], options["--trial-name"])
folder.mkdir(parents=True)
rewards = dict(verifier_result=dict(rewards=dict(reward=len(said))))
failed = dict(verifier_result=None, exception_info=dict(exception_type="NoImage"))
(folder / "result.json").write_text(json.dumps(failed if said == "fail" else rewards))
'''


def program(folder: Path, status: int = 0) -> Path:
    file = folder / "harbor"
    file.write_text(FAKE.format(python=sys.executable, status=status))
    file.chmod(0o755)
    return file


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task that needs an image."""
    folder = tmp_path / "task"
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text("[environment]\nnetwork_mode = 'no-network'\n")
    (folder / "instruction.md").write_text("Write done into answer.txt.")
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nRUN true\nWORKDIR /app\n")
    (folder / "environment" / "answer.txt").write_text("open\n")
    (folder / "tests" / "test.sh").write_text(
        "#!/bin/bash\ngrep -qc done /app/answer.txt && echo 1 > /logs/verifier/reward.txt "
        "|| echo 0 > /logs/verifier/reward.txt\n"
    )
    return folder


@pytest.mark.real
async def test_each_episode_is_a_trial_of_the_package(
    play_program: Any, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    spec = f"harbor:{task}?program={program(tmp_path)}&engine=modal"
    sample, asked = await play_program(spec, ["right"])
    assert sample.reward == 5.0 and sample.status is Sample.Status.COMPLETED
    assert asked == ["<|user|> Fix it.<|end|>\n<|assistant|> "]
    sample, _ = await play_program(spec, ["fail"])
    assert sample.reward is None and "NoImage" in sample.metadata["reward_failure"]
    sample, _ = await play_program(spec, ["crash"])
    assert sample.reward is None and "no container" in sample.metadata["reward_failure"]


@pytest.mark.real
def test_what_is_missing_is_told_in_words(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(options: str) -> str:
        environment.cache_clear()
        with pytest.raises(EnvironmentProblem) as raised:
            environment(f"harbor:{task}?{options}")
        return str(raised.value)

    assert "Python 3.12 or newer" in told("program=/none/harbor")
    assert "Python 3.12 or newer" in told(f"program={program(tmp_path, status=1)}")
    monkeypatch.setenv("PATH", str(tmp_path))
    harbor = program(tmp_path)
    assert "there is no program docker" in told(f"program={harbor}")
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho Cannot connect to the daemon >&2\nexit 1\n")
    docker.chmod(0o755)
    words = told(f"program={harbor}")
    assert "docker info failed (Cannot connect to the daemon)" in words and "start docker" in words
    assert "the agent has its own" in told(f"program={harbor}&system=x")


def test_rewards_of_a_trial() -> None:
    assert reward_of_trial({"verifier_result": {"rewards": {"reward": 1}}}) == 1.0
    several = {"tests": 1, "style": 0.5}
    assert reward_of_trial({"verifier_result": {"rewards": several}}) == several
    with pytest.raises(RuntimeError, match="Timeout"):
        reward_of_trial({"verifier_result": None, "exception_info": {"exception_type": "Timeout"}})


HARBOR = os.environ.get("HARBOR_PROGRAM", "")


@pytest.mark.skipif(not HARBOR, reason="HARBOR_PROGRAM: the command of an installed package")
@pytest.mark.real
@pytest.mark.timeout(300)
async def test_the_package_runs_a_trial(
    play_program: Any, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parents[3]}")
    spec = (
        f"harbor:{task}?program={HARBOR}&agent=harbor_parts:ShellAgent"
        "&engine=harbor_parts:BoxEnvironment"
    )
    sample, asked = await play_program(spec, ["echo done > answer.txt"])
    assert sample.reward == 1.0, json.dumps(sample.metadata)
    assert asked == ["<|user|> Write done into answer.txt.<|end|>\n<|assistant|> "]
    sample, _ = await play_program(spec, ["true"])
    assert sample.reward == 0.0
