"""Programs on agent frameworks, as they are, against the endpoint: real packages, an engine with a
script.

The packages are in an environment of their own, since their pins conflict with those of slime's
tests:
``scripts/test_agents.sh`` makes it. Without it (``SLIME_AGENTS_PYTHON``), the tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from agent_parts import ScriptedEngine, arguments, make_tokenizer

from slime.data.sample import Sample, flatten
from slime.plugins.agents.rollout import generate
from slime.plugins.agents.server import AgentServer
from slime.rollout.state import GenerateState

PYTHON = os.environ.get("SLIME_AGENTS_PYTHON", "")
CHECKOUT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not PYTHON, reason="SLIME_AGENTS_PYTHON names no environment: bash scripts/test_agents.sh"
    ),
]


def calls(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CUT = ("It is 9", {"type": "length", "length": 8})
ADD = calls("add", '{"a": 1, "b": 2}')


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer().save_pretrained(folder)
    return folder


async def play(
    checkpoint: Path, command: str, script: list[Any], **more: Any
) -> tuple[list[Sample], list[str]]:
    """One run of a command, in which the model says these texts: its samples, and the prompts of
    its requests.
    """
    async with ScriptedEngine(make_tokenizer(), script) as engine:
        args = arguments(checkpoint, engine.url, agent_command=command, **more)
        args.rollout_max_response_len = 4000
        state = GenerateState(args)
        question = [{"role": "user", "content": "What is 3 times 4?"}]
        made = await generate(
            args, Sample(index=0, group_index=0, prompt=question, label="12"), state.sampling_params
        )
        assert engine.script == [], "the program has asked for every text"
        return flatten([made]), [
            state.tokenizer.decode(body["input_ids"]) for body in engine.bodies
        ]


@pytest.mark.parametrize(
    ("program", "script", "reward", "asked"),
    [
        # The first request of the second solver may come before or after the second one of the
        # first solver.
        ("sdk_agent.py", ["9", "9", "12", "12"], 0.5, "<|user|> No, 9 is wrong. Try again.<|end|>"),
        # Answers that are cut at the limit of tokens are answers.
        ("sdk_agent.py", [CUT, CUT, CUT, CUT], 0.0, "<|user|> No, 9 is wrong. Try again.<|end|>"),
        ("graph_agent.py", [CUT, "12"], 0.5, "<|user|> 9 is too small. Try again.<|end|>"),
        (
            "graph_agent.py",
            ["Well.", "13", "12"],
            0.25,
            "<|user|> 13 is too large. Try again.<|end|>",
        ),
    ],
)
async def test_programs_of_the_example(
    endpoint: AgentServer,
    checkpoint: Path,
    program: str,
    script: list[Any],
    reward: float,
    asked: str,
) -> None:
    command = f"{PYTHON} {CHECKOUT / 'examples' / 'blackbox_agent' / program}"
    samples, prompts = await play(checkpoint, command, script)
    assert [sample.reward for sample in samples] == [reward] * len(samples), samples[0].metadata
    assert any(asked in prompt for prompt in prompts)
    assert sum(sample.metadata["session"]["turns"] for sample in samples[:1]) == len(script)
    spoken = [text for sample in samples for text in trained_texts(sample)]
    said = [text[0] if isinstance(text, tuple) else f"{text}<|end|>" for text in script]
    assert sorted(spoken) == sorted(said), "each answer is trained once"


def trained_texts(sample: Sample) -> list[str]:
    """The texts of the runs of trained tokens."""
    tokenizer, runs = make_tokenizer(), [[]]  # type: ignore[var-annotated]
    assert sample.loss_mask is not None
    for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize(
    ("program", "script", "turns_per_sample"),
    [
        ("sdk_tools", [calls("transfer_to_clerk", "{}"), ADD, "It is 3."], [1, 2]),
        ("sdk_stream", [calls("transfer_to_clerk", "{}"), ADD, "It is 3."], [1, 2]),
        (
            "sdk_responses",
            [calls("ask_clerk", '{"input": "1 and 2"}'), ADD, "3", "It is 3."],
            [2, 2],
        ),
        ("graph_tools", [ADD, "It is 3."], [2]),
    ],
)
async def test_tools_handoffs_and_sub_agents(
    endpoint: AgentServer,
    checkpoint: Path,
    program: str,
    script: list[str],
    turns_per_sample: list[int],
) -> None:
    command = f"{PYTHON} {Path(__file__).parent / 'framework_programs.py'} {program}"
    samples, prompts = await play(checkpoint, command, script, agent_tool_parser="hermes")
    assert samples[0].reward == {"said": "It is 3."}, samples[0].metadata
    assert sorted(sample.metadata["round_number"] for sample in samples) == turns_per_sample
    assert "unread_calls" not in samples[0].metadata["session"]
    assert any('"name": "add"' in prompt for prompt in prompts), (
        "the schema of the tool is in the prompt"
    )
    assert any(
        "<|tool|>" in prompt and "3" in prompt.rpartition("<|tool|>")[2] for prompt in prompts
    )


async def test_a_command_line_agent(endpoint: AgentServer, checkpoint: Path) -> None:
    """mini-swe-agent runs what the model writes in a shell, and the folder that it leaves is the
    reward.
    """
    script = [
        calls("bash", '{"command": "echo $((3 * 4)) > answer.txt; ls"}'),
        calls("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'),
    ]
    command = (
        f"bash {CHECKOUT / 'examples' / 'blackbox_agent' / 'cli_agent.sh'} {Path(PYTHON).parent}"
    )
    (sample,), prompts = await play(checkpoint, command, script, agent_tool_parser="hermes")
    assert sample.reward == 1.0, sample.metadata
    assert "answer.txt" in prompts[0]
    assert len(prompts) == 2 and "answer.txt" in prompts[1].rpartition("<|tool|>")[2], (
        "it saw what its command printed"
    )
    assert trained_texts(sample) == [f"{text}<|end|>" for text in script]
