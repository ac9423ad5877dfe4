"""Prompt and response within the model's context: what is asked of an engine, and prompts that
leave no room.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import Prompts, SmallEngine, arguments, source_of

from slime.config.args import Args
from slime.config.hf_config import context_length, rotary_limit
from slime.config.resolve import validate
from slime.config.rollout import context_limit, context_notice, served_context
from slime.config.rules import Run
from slime.data.sample import Sample, flatten
from slime.engines.http import post
from slime.plugins.agents.conversation import Conversation
from slime.plugins.agents.streaming import generate_streaming
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate_rollout_async

LONG = "x" * 60


@pytest.fixture
def checkpoint(tokenizer_dir: Path, tmp_path: Path) -> Path:
    """A tokenizer of bytes beside a model of 48 tokens, of which engines take 40."""
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "checkpoint"))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 48})
    )
    return folder


def problems_of_rotary(args: Args) -> list[str]:
    return [problem for problem in validate(Run(args)) if "rotary" in problem]


def test_what_the_engines_take(checkpoint: Path) -> None:
    def served(**more: Any) -> tuple[int | None, int | None]:
        args = arguments(checkpoint, **more)
        served = served_context(args)
        return served, context_limit(served, args.rollout_max_context_len)

    assert served() == (48, 40) and served(rollout_max_context_len=30) == (48, 30)
    assert served(rollout_max_context_len=47) == (48, 40)
    assert served(sglang={"context_length": 32}) == (32, 24) and served(
        sglang={"max_total_tokens": 20}
    ) == (20, 12)
    assert served(rollout_backend="embedded", embedded_max_total_tokens=30) == (30, 22)
    assert served_context(arguments(checkpoint, hf_checkpoint="no/where")) is None
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = {"max_position_embeddings": 100, "rope_scaling": yarn}
    assert context_length(config) == 400 and context_length(config, scaled=False) == 100
    assert (
        context_length({**config, "rope_scaling": {**yarn, "original_max_position_embeddings": 50}})
        == 100
    )
    args = arguments(checkpoint, rollout_max_response_len=100, rollout_max_prompt_len=None)
    (notice,) = context_notice(args, served_context(args))
    assert "40 tokens together" in notice
    args = arguments(checkpoint, rollout_max_response_len=10, rollout_max_prompt_len=30)
    assert context_notice(args, served_context(args)) == []


def test_samples_that_would_change_the_rotary_frequencies_of_others(checkpoint: Path) -> None:
    """Engines of slime bound them; with others the run does not start."""
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {
        "model_type": "phi3",
        "max_position_embeddings": 48,
        "original_max_position_embeddings": 20,
    }
    (checkpoint / "config.json").write_text(json.dumps({**config, "rope_scaling": long}))
    assert served_context(arguments(checkpoint, rollout_backend="embedded")) == 20
    assert (
        problems_of_rotary(
            arguments(checkpoint, rollout_backend="embedded", rollout_max_response_len=40)
        )
        == []
    )
    assert (
        problems_of_rotary(
            arguments(checkpoint, rollout_max_response_len=15, rollout_max_prompt_len=5)
        )
        == []
    )
    assert (
        problems_of_rotary(
            arguments(checkpoint, rollout_max_context_len=20, rollout_max_prompt_len=None)
        )
        == []
    )
    assert (
        problems_of_rotary(
            arguments(checkpoint, rollout_max_response_len=15, rollout_max_prompt_len=None)
        )
        != []
    )
    assert (
        problems_of_rotary(arguments(checkpoint, rollout_max_response_len=40, loss_type="sft_loss"))
        == []
    )
    (problem,) = problems_of_rotary(
        arguments(checkpoint, rollout_max_response_len=15, rollout_max_prompt_len=6)
    )
    assert problem.endswith("use --rollout-max-context-len 20")

    in_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 30}
    assert rotary_limit({"rope_parameters": in_parameters, "max_position_embeddings": 48}) == 30
    by_layer = {
        "full_attention": {"rope_type": "dynamic"},
        "sliding_attention": {"rope_type": "default"},
    }
    assert rotary_limit({"rope_parameters": by_layer, "max_position_embeddings": 48}) == 48
    assert (
        rotary_limit(
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 48}
        )
        is None
    )


@pytest.mark.parametrize(
    ("models", "served"),
    [
        (
            [
                {
                    "name": "a",
                    "server_groups": [{"num_gpus": 1, "overrides": {"context-length": 24}}],
                }
            ],
            24,
        ),
        (
            [
                {
                    "name": "a",
                    "server_groups": [{"num_gpus": 1, "overrides": {"max_total_tokens": 20}}],
                }
            ],
            20,
        ),
        (
            [
                {
                    "name": "a",
                    "server_groups": [
                        {"num_gpus": 1},
                        {"num_gpus": 1, "overrides": {"context_length": 64}},
                    ],
                }
            ],
            32,
        ),
        (  # a placeholder serves nothing, and the rollout's requests go to the first model alone
            [
                {
                    "name": "a",
                    "server_groups": [
                        {"num_gpus": 1, "overrides": {"context_length": 64}},
                        {
                            "num_gpus": 1,
                            "worker_type": "placeholder",
                            "overrides": {"context_length": 8},
                        },
                    ],
                },
                {
                    "name": "b",
                    "server_groups": [{"num_gpus": 1, "overrides": {"context_length": 16}}],
                },
            ],
            64,
        ),
        (
            [
                {
                    "name": "a",
                    "server_groups": [{"num_gpus": 1, "overrides": {"context_length": "wrong"}}],
                }
            ],
            32,
        ),
    ],
    ids=["length", "kv-cache", "least-group", "first-model", "wrong-file"],
)
def test_what_the_server_groups_take(
    checkpoint: Path, tmp_path: Path, models: list[dict[str, Any]], served: int
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(json.dumps({"sglang": models}))
    args = arguments(
        checkpoint, rollout_backend="sglang", sglang_config=str(file), sglang={"context_length": 32}
    )
    assert served_context(args) == served and context_limit(served, None) == served - 8
    assert GenerateState(args).context == served - 8, (
        "prompts and responses are checked against this"
    )


def test_the_first_model_of_the_server_groups_may_be_another_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"max_position_embeddings": 96}))
    file = tmp_path / "groups.yaml"
    model = {"name": "a", "model_path": str(tmp_path / "other"), "update_weights": True}
    file.write_text(json.dumps({"sglang": [{**model, "server_groups": [{"num_gpus": 1}]}]}))
    assert (
        served_context(arguments(checkpoint, rollout_backend="sglang", sglang_config=str(file)))
        == 96
    )


async def rollout(args: Any, prompts: Prompts) -> Any:
    return await asyncio.wait_for(generate_rollout_async(args, 0, source_of(args, prompts)), 60)


@pytest.mark.parametrize("streaming", [False, True])
async def test_prompts_without_room_are_dropped_and_counted_and_answers_are_cut(
    checkpoint: Path, streaming: bool
) -> None:
    path = f"{generate_streaming.__module__}.generate_streaming" if streaming else None
    prompts = Prompts(prompt=lambda i: LONG if i % 3 == 0 else f"prompt {i:02}: ")
    async with SmallEngine(jitter=0.0, length=lambda prompt, seed: 1000) as engine:
        args = engine.serve(
            arguments(
                checkpoint,
                rollout_max_response_len=100,
                custom_generate_function_path=path,
                rm_type="random",
            )
        )
        output = await rollout(args, prompts)
    samples = flatten(output.samples)
    assert len(output.samples) == 4 and all(sample.prompt != LONG for sample in samples)
    assert all(
        len(sample.tokens) == 40 and sample.status is Sample.Status.TRUNCATED for sample in samples
    )
    assert all(
        len(r["input_ids"]) + r["sampling_params"]["max_new_tokens"] == 40 for r in engine.requests
    )
    assert output.metrics["rollout/dynamic_filter/drop_prompt_too_long"] >= 1
    assert output.metrics["rollout/replaced_group_count"] == 0
    assert output.metrics["rollout/reward_error_count"] == 0, "no verifier was asked"


async def test_a_prompt_that_an_engine_finds_too_long_is_dropped_too(checkpoint: Path) -> None:
    """As with media, which grow in the engine."""
    async with SmallEngine(jitter=0.0) as engine:
        answer = engine.answer

        async def refuse(request: Any, body: Any) -> Any:
            from aiohttp import web

            if len(engine.requests) == 1:
                words = (
                    "The input (60 tokens) is longer than the model's context length (48 tokens)."
                )
                return web.json_response({"error": {"message": words}}, status=400)
            return await answer(request, body)

        engine.answer = refuse  # type: ignore[method-assign]
        args = engine.serve(arguments(checkpoint, n_samples_per_prompt=1))
        output = await rollout(args, Prompts())
    assert (
        len(output.samples) == 4
        and output.metrics["rollout/dynamic_filter/drop_prompt_too_long"] == 1
    )


async def test_only_prompts_without_room_are_an_error_that_says_so(checkpoint: Path) -> None:
    async with SmallEngine() as engine:
        args = engine.serve(arguments(checkpoint, rollout_batch_size=2))
        with pytest.raises(RuntimeError, match="no room"):
            await rollout(args, Prompts(prompt=lambda i: LONG))
    assert engine.requests == []


async def test_a_conversation_whose_prompt_leaves_no_room(checkpoint: Path) -> None:
    args = arguments(checkpoint)
    sample = Sample(prompt=LONG, index=0, group_index=0)
    assert await Conversation(args, sample, GenerateState(args).sampling_params).turn() is None
    assert (
        sample.status is Sample.Status.TRUNCATED
        and sample.reward_timed_out
        and sample.reward is None
    )


async def test_evaluations_have_a_limit_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "easy: ", "label": "1"}))
    own = {"rollout_max_context_len": 30, "eval_max_context_len": 36, "rm_type": "random"}
    async with SmallEngine(jitter=0.0, length=lambda prompt, seed: 1000) as engine:
        args = arguments(checkpoint, rollout_max_response_len=100, eval_max_response_len=100, **own)
        args = engine.serve(
            args.with_values(eval_prompt_data=["set", str(tmp_path / "eval.jsonl")])
        )
        output = await asyncio.wait_for(eval_rollout(args, 0), 30)
        trained = await rollout(args, Prompts(prompt=lambda i: f"prompt {i:02}: "))
    assert {len(sample.tokens) for sample in output.data["set"]["samples"]} == {36}
    assert {len(sample.tokens) for sample in flatten(trained.samples)} == {30}


async def test_evaluations_leave_them_out_and_go_on_after_an_abort(
    checkpoint: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": LONG, "label": "1"},
        {"prompt": "stop me: ", "label": "1"},
        {"prompt": "easy: ", "label": "1"},
    ]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    async with SmallEngine(jitter=0.0, length=lambda prompt, seed: 6) as engine:
        engine.slow = lambda prompt: prompt.startswith("stop me") and engine.aborts == 0
        args = engine.serve(
            arguments(checkpoint, eval_prompt_data=["set", str(tmp_path / "eval.jsonl")])
        )
        task = asyncio.ensure_future(eval_rollout(args, 0))
        while engine.running < 1 or len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        await post(f"{engine.url}/abort_request", {"abort_all": True})
        output = await asyncio.wait_for(task, 30)
    rewards = output.data["set"]["rewards"]
    assert math.isnan(rewards[0]) and not math.isnan(rewards[1]) and not math.isnan(rewards[2])
    stopped = output.data["set"]["samples"][1]
    assert stopped.response_length == 3 + 6 and len(stopped.weight_versions) == 2
