"""What all environments share: the flag, the order of tasks and its state, a class of the
user's.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from make_args import make_args, rule_problems

from slime.config.args import Args
from slime.data.sample import Sample
from slime.plugins.agents.config import ENVIRONMENT_GENERATE, ENVIRONMENT_SOURCE
from slime.plugins.agents.environments import EnvironmentProblem, Spec, environment, own_seed
from slime.plugins.agents.environments.rollout import generate
from slime.plugins.agents.environments.source import EnvironmentSource
from slime.registry import parts

ECHO = '''
import numpy as np

from slime.plugins.agents.environments import Environment, Episode, Step, StepFailed, Task

class Echo(Environment):
    """Reward 1 for repeating the word; a wrong answer gets another try."""

    def __init__(self, count=10, seed=0):
        self.count = count

    def __len__(self):
        return self.count

    def task(self, number):
        return Task([{"role": "user", "content": f"Say word{number}."}], f"word{number}", {"level": number % 3})

    async def start(self, number, limits):
        if number == 9:
            raise OSError("no room")
        return Once(f"word{number}")

class Once(Episode):
    def __init__(self, word):
        self.word, self.closed = word, 0

    async def step(self, text):
        if text == "nothing":
            return None
        if text == "numpy":
            return Step(reward=np.float32(0.5), done=True)
        if text == "nan":
            return Step(reward=float("nan"), done=True)
        if text == self.word:
            return Step(reward=1.0, done=True)
        return Step([{"role": "user", "content": "Again."}])
'''


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo.py").write_text(ECHO)
    return f"{tmp_path}/echo.py:Echo"


def source_args(spec: str, folder: Path, **more: Any) -> Args:
    return make_args(environment=spec, hf_checkpoint=str(folder), n_samples_per_prompt=2, **more)


def test_an_environment_without_a_seed_gets_that_of_the_run() -> None:
    assert own_seed("reasoning_gym:chain_sum", 5) == "reasoning_gym:chain_sum?seed=5"
    assert own_seed("gymnasium:x?tag=a", 5) == "gymnasium:x?tag=a&seed=5"
    assert own_seed("gymnasium:x?seed=1&tag=a", 5) == "gymnasium:x?seed=1&tag=a"


@pytest.mark.parametrize(
    "text", ["Write: <a>4</a>", "Solve # it", "yes", "*Be* brief", "[x]", "5", "it's", "a: 'b'"]
)
@pytest.mark.parametrize("option", ["system", "tag"])
def test_a_text_is_taken_as_it_is(option: str, text: str) -> None:
    """YAML would make a mapping, a shorter text, a truth value or an error of these."""
    for name in parts("environment"):
        whole = own_seed(f"{name}:x?{option}={quote(text)}", 1)
        assert Spec.parse(whole).options == {option: text, "seed": 1}
    assert Spec.parse(f"gymnasium:x?{option}='a: b'").options == {option: "a: b"}
    assert Spec.parse(f"own.py:Mine?{option}=5").options == {option: 5}, (
        "the user's own classes get YAML"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":x",
        "reasoning_gym:a?b",
        "reasoning_gym:a?b=",
        "reasoning_gym:a?b=1&b=2",
        "reasoning_gym:a?b=[",
    ],
)
def test_what_is_no_environment_is_told(text: str) -> None:
    with pytest.raises(EnvironmentProblem):
        environment(text)


def test_the_flag_selects_the_source_and_the_generate_function(echo: str, bytes_dir: Path) -> None:
    args = source_args(echo, bytes_dir)
    assert (args.data_source_path, args.custom_generate_function_path) == (
        ENVIRONMENT_SOURCE,
        ENVIRONMENT_GENERATE,
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"prompt_data": "x.jsonl"}, {"custom_generate_function_path": "a.b"}, {"data_source_path": "a.b"},
        {"rm_type": "math"}, {"agent_command": "true"},
    ],
)  # fmt: skip
def test_flags_that_say_otherwise_are_refused(flags: dict[str, str]) -> None:
    (problem,) = rule_problems(make_args(environment="reasoning_gym:chain_sum", **flags))
    (option,) = (f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    assert "--environment reasoning_gym:chain_sum" in problem and option in problem


def test_a_restored_source_goes_on_with_the_same_tasks(echo: str, bytes_dir: Path) -> None:
    args = source_args(echo, bytes_dir, rollout_shuffle=True)
    source = EnvironmentSource(args)
    assert len(source) == 10
    source.get_samples(7)
    state = copy.deepcopy(source.state_dict())
    expected = [group[0].label for group in source.get_samples(20)]
    again = EnvironmentSource(args)
    again.load_state_dict(state)
    assert [group[0].label for group in again.get_samples(20)] == expected
    assert sorted(expected[3:13]) == sorted(f"word{i}" for i in range(10)), (
        "an epoch has each task once"
    )
    other = EnvironmentSource(source_args(echo, bytes_dir, rollout_shuffle=True, rollout_seed=7))
    other.get_samples(7)
    assert [group[0].label for group in other.get_samples(20)] != expected


def test_a_change_of_the_environment_is_told(
    echo: str, bytes_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = EnvironmentSource(source_args(echo, bytes_dir)).state_dict()
    EnvironmentSource(source_args(f"{echo}?count=10", bytes_dir)).load_state_dict(state)
    assert "saved with" in caplog.text


def test_long_prompts_are_left_out_and_metadata_come_along(echo: str, bytes_dir: Path) -> None:
    source = EnvironmentSource(
        source_args(
            f"{echo}?count=11",
            bytes_dir,
            rollout_max_prompt_len=len("<user>Say word0.") + 1 + len("<assistant>"),
        )
    )
    labels = [group[0].label for group in source.get_samples(11)]
    assert labels == [*(f"word{i}" for i in range(10)), "word0"], (
        "the prompt of word10 has a token more"
    )
    assert source.get_samples(1)[0][0].metadata["level"] == 1


async def test_a_class_of_the_users_is_an_environment(echo: str, play: Any) -> None:
    sample, script = await play(echo, ["what?", "word4"], number=4)
    assert sample.reward == 1.0 and script.asked[1].endswith("<user>Again.<eos><assistant>")
    assert own_seed(echo, 5) == echo, "it gets no option that it did not ask for"


async def test_a_reward_of_numpy_can_be_written_as_json(echo: str, play: Any) -> None:
    sample, _ = await play(echo, ["numpy"])
    assert json.dumps([sample.reward, sample.metadata["environment_return"]]) == "[0.5, 0.5]"


@pytest.mark.parametrize(
    ("says", "number", "said"),
    [
        (["nothing"], 1, "AttributeError: 'NoneType'"),
        (["nan"], 1, "reward nan"),
        ([], 9, "OSError: no room"),
    ],
)
async def test_failures_are_counted_and_no_reward(
    echo: str, play: Any, says: list[str], number: int, said: str
) -> None:
    sample, _ = await play(echo, says, number=number)
    assert (
        sample.reward is None and sample.remove_sample and said in sample.metadata["reward_failure"]
    )
    assert (
        sample.response_length == sum(sample.loss_mask or [1] * sample.response_length) or not says
    )


CHANGING = """
from slime.plugins.agents.environments import Environment, Episode, Step, Task

class Changing(Environment):
    \"\"\"Asks for another number in each of its episodes, or ends a later one at once.\"\"\"

    def __init__(self, numbers="7", ends=False):
        self.numbers, self.ends, self.begun = str(numbers), ends, 0

    def __len__(self):
        return 1

    def task(self, number):
        return Task([{"role": "user", "content": "Hello."}])

    async def start(self, number, limits):
        self.begun += 1
        return Talk(self.numbers[(self.begun - 1) % len(self.numbers)], self.ends and self.begun > 1)

class Talk(Episode):
    def __init__(self, wanted, ends):
        self.wanted, self.ends, self.heard = wanted, ends, 0

    async def step(self, text):
        self.heard += 1
        if self.ends or self.heard == 3:
            return Step(reward=float(text == self.wanted), done=True)
        content = "x" * 3000 + f"Say {self.wanted}." if self.heard == 1 else "Sure?"
        return Step([{"role": "user", "content": content}], reward=0.25)
"""


@pytest.mark.parametrize(
    ("options", "reward", "told"),
    [
        ("", 1.5, ""),
        (
            "?numbers=73",
            None,
            "a new episode answered otherwise at turn 1 than the one of the aborted sample",
        ),
        ("?ends=true", None, "a new episode ended the episode at turn 1"),
    ],
)
@pytest.mark.parametrize(
    "says", [["hi", "7", "ABORT"], ["hi", "7", "ABORTED"], ["hi", "7", "7ABORT"]], ids=str
)
async def test_an_aborted_episode_continues_only_as_the_one_that_the_model_saw(
    tmp_path: Path, play: Any, says: list[str], options: str, reward: float | None, told: str
) -> None:
    """Otherwise the transcript would be that of one episode, and the reward that of another."""
    (tmp_path / f"changing{len(options)}.py").write_text(CHANGING)
    sample, script = await play(
        f"{tmp_path}/changing{len(options)}.py:Changing{options}",
        says,
        max_turns=9,
        rollout_max_response_len=3100,
    )
    assert sample.status is Sample.Status.ABORTED and len(sample.metadata["model_turns"]) == 3
    script.says = ["<eos>" if "7ABORT" in says else "7<eos>"]
    again = Sample.from_dict(sample.to_dict())
    await generate(script.args, again, script.params)
    assert again.reward == reward and told in again.metadata.get("reward_failure", "")
    assert again.status is (Sample.Status.FAILED if told else Sample.Status.COMPLETED)
    assert again.remove_sample == bool(told)


def test_a_class_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class Other:\n    pass\n")
    with pytest.raises(EnvironmentProblem, match=r"Other.*slime\.environments\.base\.Environment"):
        environment(f"{tmp_path}/other.py:Other")


async def test_a_class_of_ones_own_may_speak_with_the_model_by_itself(
    play_program: Any, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import aiohttp\n"
        "from slime.environments.base import Task\n"
        "from slime.plugins.agents.environments.played import Played, ask\n"
        "class Own(Played):\n"
        "    def __len__(self):\n        return 1\n"
        "    def task(self, number):\n        return Task('Say yes.')\n"
        "    async def play(self, number, program):\n"
        "        body = {'model': program.model, 'messages': [{'role': 'user', 'content': 'Say yes.'}]}\n"
        "        async with aiohttp.ClientSession() as http:\n"
        "            url = f'{program.openai_base_url}/chat/completions'\n"
        "            answer = await ask(http, url, program.api_key, body)\n"
        "        return float(answer['choices'][0]['message']['content'] == 'yes')\n"
    )
    sample, asked = await play_program(f"{file}:Own", ["yes"])
    assert sample.reward == 1.0 and "Say yes." in asked[0]
