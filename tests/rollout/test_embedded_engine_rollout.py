"""The whole way of a sample with the real model behind the real embedded engine, with and without
the real router.
"""

import asyncio
import random

import pytest
from rollout_parts import Prompts, arguments, source_of

from slime.data.sample import Sample, flatten
from slime.engines.handle import worker_urls
from slime.plugins.agents.conversation import Conversation
from slime.rollout.evaluate import NotCompleted, complete
from slime.rollout.sglang_rollout import GenerateState, generate_rollout_async, get_model_url

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(280)]


def product(i):
    a, b = 2 + i % 8, 2 + i // 8 % 8
    return [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": f"What is {a} times {b}?"},
    ]


class Products(Prompts):
    def __getitem__(self, i):
        return Sample(prompt=product(i), label=str((2 + i % 8) * (2 + i // 8 % 8)))


@pytest.fixture(scope="module")
def engine(smollm2, serve_embedded):
    args = arguments(
        smollm2,
        rollout_dtype="float32", train_dtype="float32", embedded_device="cpu", embedded_max_running_requests=8,
        embedded_max_total_tokens=None, threads_per_process=1, deterministic=True,
    )  # fmt: skip
    with serve_embedded(args) as process:
        yield process


def run_arguments(smollm2, url, **more):
    host, port = url.removeprefix("http://").split(":")
    settings = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 3,
        "rollout_max_response_len": 10,
        "rm_type": "last_number",
        "rollout_backend": "embedded",
        "phase_timeout": 120.0,
        "sglang_server_concurrency": 8,
    }
    return arguments(
        smollm2, sglang_router_ip=host, sglang_router_port=int(port), **{**settings, **more}
    )


async def test_a_deterministic_rollout_is_the_same_in_any_order(smollm2, engine, monkeypatch):
    """Requests are sent at random times, so they meet other neighbours in the engine's batch."""
    from slime.rollout import generate as module

    ask = module.ask_engine

    async def late(*args):
        await asyncio.sleep(random.random() * 0.3)
        return await ask(*args)

    monkeypatch.setattr(module, "ask_engine", late)
    results = []
    for _ in range(2):
        args = run_arguments(smollm2, engine.url, deterministic=True)
        output = await generate_rollout_async(args, 0, source_of(args, Products()))
        results.append(
            [(s.index, s.tokens, s.rollout_log_probs, s.reward) for s in flatten(output.samples)]
        )
        for sample in flatten(output.samples):
            tokenizer = GenerateState(args).tokenizer
            tail = sample.tokens[-sample.response_length :]
            ended = tail[-1] == tokenizer.eos_token_id
            assert (
                tokenizer.decode(tail[:-1] if ended else tail, skip_special_tokens=False)
                == sample.response
            )
            assert sample.reward in (0.0, 1.0) and all(
                value <= 0 for value in sample.rollout_log_probs
            )
            assert tokenizer.decode(sample.tokens).startswith("<|im_start|>system\nAnswer briefly.")
    assert results[0] == results[1]
    assert len({tuple(tokens) for _, tokens, *_ in results[0]}) > 2, "the samples of a group differ"


async def test_prompts_and_parameters_that_are_refused_are_no_error_of_the_run(smollm2, engine):
    args = run_arguments(smollm2, engine.url)
    for prompts, changes, told in (
        (["a"], {"temperature": -1}, "temperature"),
        (["a"], {"no_such_parameter": 1}, "no_such_parameter"),
        ([[{"role": "user", "content": [{"type": "nothing"}, 3]}]], {}, "prompt 0"),
    ):
        with pytest.raises(NotCompleted, match=told):
            await complete(GenerateState(args), prompts, 2, changes)
    ((answer,),) = await complete(GenerateState(args), ["a"], 1, {"max_new_tokens": 2})
    assert answer.response_length == 2


async def test_partial_rollout_over_the_real_engine_and_router(smollm2, engine, tmp_path):
    from slime.engines.launch import RouterSettings
    from slime.engines.router import start_router

    args = run_arguments(
        smollm2, engine.url, rollout_batch_size=1, over_sampling_batch_size=2, n_samples_per_prompt=2,
        partial_rollout=True, rollout_max_response_len=400, rm_type="random",
    )  # fmt: skip

    class ShortAndLong(Products):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            if i == 0:
                sample.prompt = [
                    {
                        "role": "user",
                        "content": "Tell me a very long story about a river, in 500 words.",
                    }
                ]
            return sample

    router = start_router(
        RouterSettings.of(args, args.router),
        [engine.url],
        "127.0.0.1",
        log_path=tmp_path / "router.log",
    )
    try:
        args.sglang_router_ip, args.sglang_router_port = router.url.removeprefix("http://").split(
            ":"
        )
        assert await worker_urls(get_model_url(args, path="")) == [engine.url]
        source = source_of(args, ShortAndLong())
        first = await generate_rollout_async(args, 0, source)
        assert [g[0].group_index for g in first.samples] == [1]
        partial = {s.index: list(s.tokens) for s in flatten(source.buffer)}
        assert [g[0].group_index for g in source.buffer] == [0]
        assert any(
            s.status is Sample.Status.ABORTED and s.response_length for s in source.buffer[0]
        )
        GenerateState(args).sampling_params["max_new_tokens"] = max(
            len(t) for t in partial.values()
        )
        args.over_sampling_batch_size = None
        second = await generate_rollout_async(args, 1, source)
    finally:
        router.stop()
    assert [g[0].group_index for g in second.samples] == [0]
    for sample in flatten(second.samples):
        assert sample.tokens[: len(partial[sample.index])] == partial[sample.index]
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.loss_mask)


async def test_streaming_over_the_real_engine_gives_the_same_tokens(smollm2, engine):
    outputs = []
    for path in (None, "slime.rollout.sglang_streaming_rollout.generate_streaming"):
        args = run_arguments(
            smollm2, engine.url, deterministic=True, custom_generate_function_path=path
        )
        output = await generate_rollout_async(args, 0, source_of(args, Products()))
        outputs.append(
            [(s.tokens, s.response, s.rollout_log_probs, s.status) for s in flatten(output.samples)]
        )
    assert outputs[0] == outputs[1]


async def test_the_teacher_of_a_distillation_may_be_an_engine(smollm2, engine):
    args = run_arguments(
        smollm2,
        engine.url,
        rm_url=f"{engine.url}/generate",
        custom_rm_path="slime.rollout.on_policy_distillation.reward_func",
    )
    output = await generate_rollout_async(args, 0, source_of(args, Products()))
    for sample in flatten(output.samples):
        # the teacher is the student, and temperature is 1: its log-probs are those that the engine
        # sampled with
        assert sample.teacher_log_probs == pytest.approx(sample.rollout_log_probs, abs=1e-3)


async def chat(args, sample, sampling_params, evaluation=False):
    talk = Conversation(args, sample, sampling_params, evaluation)
    while await talk.turn(stop=["."], max_tokens=6) is not None:
        text = " Hm, and"
        fits = (
            talk.observe(text)
            if len(talk.turns) % 2
            else talk.reply([{"role": "user", "content": text}])
        )
        if not fits:
            break
    return sample


async def test_the_turns_of_a_conversation_are_scored_as_they_were_sampled(smollm2, engine):
    """Scored again as one sequence, each token that is trained has the log-prob that it was sampled
    with.
    """
    args = run_arguments(
        smollm2, engine.url, rm_url=f"{engine.url}/generate", rollout_max_response_len=60, max_turns=3,
        custom_rm_path="slime.rollout.on_policy_distillation.reward_func",
        custom_generate_function_path=f"{__name__}.chat",
    )  # fmt: skip
    output = await generate_rollout_async(args, 0, source_of(args, Products()))
    for sample in flatten(output.samples):
        assert (
            sample.metadata["round_number"] == 3
            and 0 < sum(sample.loss_mask) < sample.response_length
        )
        again = [
            score
            for score, mask in zip(sample.teacher_log_probs, sample.loss_mask, strict=True)
            if mask
        ]
        sampled = [
            score
            for score, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
            if mask
        ]
        assert again == pytest.approx(sampled, abs=1e-3)
        assert (
            sample.response.count(" Hm, and") == 3
            and ("<|im_start|>user\n Hm, and<|im_end|>") in sample.response
        )
