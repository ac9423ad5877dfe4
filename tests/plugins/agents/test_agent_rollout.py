"""Agent programs in rollouts with the real embedded engine: their rewards, their faults, their
ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import agent_programs
import psutil
import pytest
from agent_parts import arguments

from slime.data.convert import samples_to_train_data
from slime.data.sample import Sample, flatten
from slime.data.source import RolloutDataSourceWithBuffer
from slime.plugins.agents import session as session_module
from slime.plugins.agents.messages import Ask
from slime.plugins.agents.server import AgentServer
from slime.rollout.group import generate_and_rm, generate_and_rm_group
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def group(label: str = "1") -> list[Any]:
    return [
        Sample(group_index=0, index=i, prompt=agent_programs.QUESTION, label=label)
        for i in range(2)
    ]


def run_arguments(tiny_model: Path, engine: Any, program: str, **more: Any) -> Any:
    return arguments(
        tiny_model, engine.url, agent_function_path=f"agent_programs:{program}", **more
    )


async def run_group(args: Any, label: str = "1") -> list[Sample]:
    return flatten(
        await generate_and_rm_group(args, group(label), GenerateState(args).sampling_params)
    )


@pytest.mark.parametrize(
    ("program", "reward", "leaves"), [("two_turns", 0.25, 1), ("plain", {"score": 0.5}, 1)]
)
async def test_functions(
    endpoint: AgentServer, tiny_model: Path, engine: Any, program: str, reward: Any, leaves: int
) -> None:
    args = run_arguments(tiny_model, engine, program)
    samples = await run_group(args)
    assert args.custom_generate_function_path == "slime.plugins.agents.rollout.generate"
    # a dict of numbers is several rewards, and their sum is trained
    total = sum(reward.values()) if isinstance(reward, dict) else reward
    assert [sample.reward for sample in samples] == [total] * 2 and len(samples) == 2 * leaves
    assert samples[0].tokens != samples[1].tokens, "each sample of a group has seeds of its own"
    tokenizer = GenerateState(args).tokenizer
    for sample in samples:
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        ended = sample.tokens[-1] in GenerateState(args).end_token_ids
        response = sample.tokens[
            len(sample.tokens) - sample.response_length : -1 if ended else None
        ]
        assert tokenizer.decode(response) == sample.response
        assert sample.metadata["session"]["turns"] == sample.metadata["round_number"]
    assert endpoint.sessions == {}


async def test_a_program_that_blocks_its_loop_and_leaves_the_reward_to_the_run(
    endpoint: AgentServer, tiny_model: Path, engine: Any
) -> None:
    args = run_arguments(tiny_model, engine, "blocking", rm_type="random")
    samples = await run_group(args)
    assert len(samples) == 4, "two conversations each"
    for first, second in (samples[:2], samples[2:]):
        assert (
            first.rollout_id == second.rollout_id is not None
            and first.reward == second.reward is not None
        )
    data = samples_to_train_data(args, [[samples[:2], samples[2:]]])
    assert data["rollout_mask_sums"][0] == sum(s.effective_response_length for s in samples[:2])


async def test_a_command(endpoint: AgentServer, tiny_model: Path, engine: Any) -> None:
    script = f"{sys.executable} {Path(agent_programs.__file__)}"
    args = arguments(tiny_model, engine.url, agent_command=f"{script} pays")
    params = {**GenerateState(args).sampling_params, "sampling_seed": 1}
    (sample,) = flatten([await generate_and_rm(args, group(label="3")[0], params)])
    assert sample.reward == 1.5 and sample.effective_response_length
    args = arguments(tiny_model, engine.url, agent_command=f"{script} fails")
    samples = await run_group(args)
    assert all(
        sample.status is Sample.Status.FAILED and sample.reward is None for sample in samples
    )
    assert "status 1" in samples[0].metadata["reward_failure"]


async def test_a_command_that_hangs_is_killed_with_its_children(
    endpoint: AgentServer, tiny_model: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("SLIME_TEST_AGENT", mark)
    command = f"{sys.executable} {Path(agent_programs.__file__)} hangs"
    args = arguments(tiny_model, engine.url, agent_command=command, agent_timeout=2.0)
    samples = await run_group(args)
    assert all(
        sample.reward_timed_out and sample.status is Sample.Status.FAILED for sample in samples
    )
    assert all(sample.metadata["reward_failure"].startswith("timeout") for sample in samples)
    until = time.monotonic() + 60
    while (
        left := [
            p.pid for p in psutil.process_iter() if _environment(p).get("SLIME_TEST_AGENT") == mark
        ]
    ) and (time.monotonic() < until):
        await asyncio.sleep(0.1)
    assert set(left) <= {os.getpid()}


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


async def test_a_program_that_asks_nothing_about_an_image_costs_its_sample_only(
    endpoint: AgentServer, tiny_model: Path, engine: Any
) -> None:
    """The model takes text only, and gets a placeholder where a program sends an image."""
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]
    sample = Sample(group_index=0, index=0, prompt=[{"role": "user", "content": parts}])
    sample.multimodal_inputs = {"images": ["a.png"]}
    args = run_arguments(tiny_model, engine, "silent")
    (made,) = flatten(await generate_and_rm(args, sample, GenerateState(args).sampling_params))
    assert made.status is Sample.Status.FAILED and made.remove_sample and made.response_length == 1


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        (
            "raises",
            Sample.Status.FAILED,
            "error: the agent program raised KeyError: 'my own mistake'",
        ),
        (
            "silent",
            Sample.Status.FAILED,
            "error: the agent program ended without any answer from the model",
        ),
        ("too_much", Sample.Status.TRUNCATED, "error: the agent program raised BadRequestError"),
    ],
)
async def test_a_program_that_fails_is_counted_and_never_scored(
    endpoint: AgentServer,
    tiny_model: Path,
    engine: Any,
    program: str,
    status: Sample.Status,
    words: str,
) -> None:
    args = run_arguments(tiny_model, engine, program, rm_type="random")
    samples = await run_group(args)
    for sample in samples:
        assert sample.reward is None and sample.reward_timed_out and sample.status is status
        assert sample.metadata["reward_failure"].startswith(words)
    data = samples_to_train_data(args, [samples])
    assert not any(map(any, data["loss_masks"])) and data["rewards"] == [0.0, 0.0]


class Numbered:
    """A data set of numbers."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Sample:
        return Sample(prompt=agent_programs.QUESTION, label=str(i))


@pytest.mark.slow
async def test_clients_that_disappear_are_replaced_in_a_rollout(
    endpoint: AgentServer, tiny_model: Path, engine: Any
) -> None:
    args = run_arguments(
        tiny_model,
        engine,
        "hangs_on_odd",
        agent_timeout=5.0,
        rollout_batch_size=3,
        n_samples_per_prompt=2,
    )
    output = await generate_rollout_async(args, 0, RolloutDataSourceWithBuffer(args, Numbered()))  # type: ignore[arg-type]
    assert [int(flatten(entry)[0].label) % 2 for entry in output.samples] == [0, 0, 0]
    gone = output.metrics["rollout/replaced_group_count"]
    assert gone >= 1 and output.metrics["rollout/reward_timeout_count"] == 2 * gone


async def test_when_the_rollout_is_over_programs_end_and_their_samples_begin_anew(
    endpoint: AgentServer, tiny_model: Path, engine: Any
) -> None:
    from slime.rollout.abort import abort

    args = run_arguments(tiny_model, engine, "endless")
    task = asyncio.ensure_future(run_group(args))
    async with asyncio.timeout(30):
        while sum(session.counts["turns"] for session in endpoint.sessions.values()) < 4:
            await asyncio.sleep(0.05)
        await abort(GenerateState(args))
        samples = await task
    assert [sample.status for sample in samples] == [Sample.Status.ABORTED] * 2
    assert all(sample.response_length == 0 for sample in samples) and endpoint.sessions == {}
    GenerateState(args).reset()
    args.agent_function_path = "agent_programs:two_turns"
    again = flatten(await generate_and_rm_group(args, samples, GenerateState(args).sampling_params))
    assert [sample.reward for sample in again] == [0.25, 0.25]


async def test_zero_drift_over_random_conversations(
    endpoint: AgentServer, tiny_model: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is, token by token, what the engine saw and sampled. The tokenizer merges
    across turns, and a random model's tokens are rarely those that their text would be encoded
    to."""
    seen: list[tuple[list[int], list[int], list[float]]] = []
    ask_engine = session_module.ask_engine

    async def recorded(state: Any, sample: Sample, body: dict[str, Any]) -> Any:
        output = await ask_engine(state, sample, body)
        assert output is not None
        scored = output["meta_info"]["output_token_logprobs"]
        seen.append(
            (list(body["input_ids"]), [item[1] for item in scored], [item[0] for item in scored])
        )
        return output

    monkeypatch.setattr(session_module, "ask_engine", recorded)
    args = arguments(tiny_model, engine.url)
    state = GenerateState(args)
    words = [
        "the user",
        " end of",
        "turn <|user|> x",
        "\n",
        "answer",
        "<|assistant|> ",
        "é 漢字",
        "  ",
    ]

    async def talk(number: int) -> list[Sample]:
        draw = random.Random(number)
        session = endpoint.open(state, Sample(), {**state.sampling_params, "sampling_seed": number})
        told: list[list[dict[str, Any]]] = [[]]
        for _ in range(draw.randint(2, 5)):
            messages = [
                *draw.choice(told[-2:]),
                {"role": "user", "content": "".join(draw.choices(words, k=4))},
            ]
            ask = Ask(messages, max_tokens=draw.randint(1, 12))
            turn = await session.answer(ask, session.prepare(ask))
            told.append([*messages, turn.answer])
        return session.tree.samples(state, session.sample)

    samples = [sample for talks in await asyncio.gather(*map(talk, range(150))) for sample in talks]
    known = {(tuple(prompt), tuple(output)): log_probs for prompt, output, log_probs in seen}
    trained = 0
    for sample in samples:
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        first = len(sample.tokens) - sample.response_length
        at = first
        while at < len(sample.tokens):
            mask = sample.loss_mask[at - first]
            end = next(
                (i for i in range(at, len(sample.tokens)) if sample.loss_mask[i - first] != mask),
                None,
            )
            end = len(sample.tokens) if end is None else end
            if mask:
                log_probs = known[tuple(sample.tokens[:at]), tuple(sample.tokens[at:end])]
                assert sample.rollout_log_probs[at - first : end - first] == log_probs
                trained += end - at
            at = end
    assert trained == sum(len(output) for _, output, _ in seen), (
        "each sampled token is trained once"
    )
    decode = state.tokenizer.decode
    retokenised = [
        state.tokenizer(decode(s.tokens), add_special_tokens=False)["input_ids"] for s in samples
    ]
    assert (
        sum(ids != sample.tokens for ids, sample in zip(retokenised, samples, strict=True))
        > len(samples) // 2
    )
