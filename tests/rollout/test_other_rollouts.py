"""SFT, distillation, streaming, the standing pool, replay and sleep."""

import asyncio

import pytest
from aiohttp import web
from rollout_parts import Prompts, SmallEngine, arguments, source_of, until

from slime.data.sample import Sample, flatten
from slime.observability.debug_data import save_rollout
from slime.rollout import forge_load, on_policy_distillation, sft_rollout, sleep_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.sglang_rollout import GenerateState, generate_rollout_async

pytestmark = pytest.mark.timeout(60)
STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"


# --- filters ---------------------------------------------------------------------------------


def group(*rewards):
    return [Sample(reward=reward, reward_timed_out=reward is None) for reward in rewards]


def test_the_built_in_filters():
    args = arguments("unused")
    assert check_reward_nonzero_std(args, group(0.0, 1.0)).keep
    assert check_reward_nonzero_std(args, group(1.0, 1.0)) == DynamicFilterOutput(
        False, "zero_std_1.0"
    )
    assert check_reward_nonzero_std(args, group(1.0, None, 1.0)).keep is False
    assert check_reward_nonzero_std(args, [group(1.0, 0.0), Sample(reward=1.0)]).keep
    assert check_reward_nonzero_std_with_fallback(args, group(0.0, 0.0)) == DynamicFilterOutput(
        False, "zero_std_0.0", True
    )
    assert check_reward_nonzero_std_with_fallback(args, group(0.0, 1.0)) == DynamicFilterOutput(
        True
    )
    args.reward_key = "score"
    assert check_reward_nonzero_std(args, group({"score": -1.0}, {"score": 1.0})).keep


def test_filter_answers():
    import numpy as np

    assert call_dynamic_filter(lambda a, g: np.bool_(True), None, []).keep
    assert call_dynamic_filter(lambda a, g: False, None, []) == DynamicFilterOutput(False)
    with pytest.raises(TypeError, match="not a bool"):
        call_dynamic_filter(lambda a, g: 1.0, None, [])


# --- SFT -------------------------------------------------------------------------------------


def conversation(i):
    return [
        {"role": "user", "content": f"hello {i}"},
        {"role": "assistant", "content": f"answer {i}"},
    ]


def test_sft_masks_everything_but_the_assistant(smollm2):
    args = arguments(smollm2, n_samples_per_prompt=1, loss_mask_type="qwen", loss_type="sft_loss")
    output = sft_rollout.generate_rollout(args, 0, source_of(args, Prompts(prompt=conversation)))
    assert len(output.samples) == 4
    tokenizer = GenerateState(args).tokenizer
    for i, sample in enumerate(flatten(output.samples)):
        tail = sample.tokens[-sample.response_length :]
        trained = tokenizer.decode(
            [t for t, mask in zip(tail, sample.loss_mask, strict=True) if mask]
        )
        assert trained.strip().removesuffix("<|im_end|>") == f"answer {i}"
        assert f"hello {i}" in tokenizer.decode(sample.tokens[: -sample.response_length])
        assert (
            sample.status is Sample.Status.COMPLETED
            and sample.reward == 0.0
            and sample.rollout_log_probs is None
        )


def test_sft_renders_with_the_arguments_of_the_template(smollm2, monkeypatch):
    more = {"n_samples_per_prompt": 1, "loss_mask_type": "qwen", "loss_type": "sft_loss"}
    args = arguments(smollm2, apply_chat_template_kwargs={"mode": "short"}, **more)
    tokenizer = GenerateState(args).tokenizer
    monkeypatch.setattr(
        tokenizer, "chat_template", "{{ mode or 'long' }}|" + tokenizer.chat_template
    )
    output = sft_rollout.generate_rollout(args, 0, source_of(args, Prompts(prompt=conversation)))
    assert tokenizer.decode(flatten(output.samples)[0].tokens).startswith("short|")


def test_sft_says_how_many_conversations_are_longer_than_the_context(smollm2, monkeypatch, caplog):
    args = arguments(smollm2, n_samples_per_prompt=1, loss_mask_type="qwen", loss_type="sft_loss")
    monkeypatch.setattr(sft_rollout, "context_length", lambda config: 40)
    long = Prompts(prompt=lambda i: conversation("hello " * 50 * (i % 2)))
    output = sft_rollout.generate_rollout(args, 0, source_of(args, long))
    assert "2 of 4 conversations are longer than the model's context of 40 tokens" in caplog.text
    assert max(len(sample.tokens) for sample in flatten(output.samples)) > 100


def test_sft_says_what_it_cannot_train_on(smollm2):
    args = arguments(smollm2, n_samples_per_prompt=1, loss_mask_type="qwen")
    with pytest.raises(ValueError, match=r"messages.*str"):
        sft_rollout.generate_rollout(args, 0, source_of(args))
    only_user = Prompts(prompt=lambda i: [{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match=r"sample 0.*conversation"):
        sft_rollout.generate_rollout(args, 0, source_of(args, only_user))
    masked = Prompts(
        prompt=lambda i: [*conversation(i)[:1], {**conversation(i)[1], "step_loss_mask": 0}]
    )
    with pytest.raises(ValueError, match=r"sample 0.*assistant turn"):
        sft_rollout.generate_rollout(args, 0, source_of(args, masked))
    with pytest.raises(ValueError, match="no evaluation"):
        sft_rollout.generate_rollout(args, 0, source_of(args), evaluation=True)


# --- distillation ----------------------------------------------------------------------------


class Teacher:
    """Scores every token it is sent; log-prob = -id / 1000."""

    def __init__(self, drop=0, shift=0):
        self.drop, self.shift, self.bodies = drop, shift, []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/generate", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/generate"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        scored = [
            [None if i == 0 else -t / 1000, t + self.shift, None]
            for i, t in enumerate(body["input_ids"])
        ]
        return web.json_response(
            {"text": "", "meta_info": {"input_token_logprobs": scored[self.drop :]}}
        )


async def test_the_teacher_scores_the_students_tokens(tokenizer_dir):
    path = "slime.rollout.on_policy_distillation.reward_func"
    async with Teacher() as teacher, SmallEngine() as engine:
        args = engine.serve(arguments(tokenizer_dir, custom_rm_path=path, rm_url=teacher.url))
        output = await generate_rollout_async(args, 0, source_of(args))
    for sample in flatten(output.samples):
        assert sample.teacher_log_probs == [
            -t / 1000 for t in sample.tokens[-sample.response_length :]
        ]
    assert (
        teacher.bodies[0]["sampling_params"]["max_new_tokens"] == 0
        and teacher.bodies[0]["return_logprob"] is True
    )
    samples = flatten(output.samples)
    assert on_policy_distillation.post_process_rewards(args, samples) == ([0.0] * 8, [0.0] * 8)
    samples[3].teacher_log_probs = None
    with pytest.raises(ValueError, match=r"sample 3.*teacher_log_probs"):
        on_policy_distillation.post_process_rewards(args, samples)


async def test_a_teacher_in_the_trainer_is_not_asked_here(tokenizer_dir):
    args = arguments(tokenizer_dir, opd_type="megatron")
    sample = Sample(index=0, tokens=[5, 6], response_length=1)
    assert await on_policy_distillation.reward_func(args, sample) == 0.0
    assert on_policy_distillation.post_process_rewards(args, [sample]) == ([0.0], [0.0])


async def test_a_teacher_that_scores_something_else_is_an_error(tokenizer_dir):
    sample = Sample(index=1, tokens=[5, 6, 7], response_length=2)
    async with Teacher(drop=1) as short, Teacher(shift=1) as other:
        with pytest.raises(ValueError, match=r"2 of.*3 tokens"):
            await on_policy_distillation.reward_func(
                arguments(tokenizer_dir, rm_url=short.url), sample
            )
        with pytest.raises(ValueError, match="tokenizer"):
            await on_policy_distillation.reward_func(
                arguments(tokenizer_dir, rm_url=other.url), sample
            )
    with pytest.raises(ValueError, match="--rm-url"):
        await on_policy_distillation.reward_func(arguments(tokenizer_dir), sample)


# --- streaming -------------------------------------------------------------------------------


def rows(output):
    return [
        (s.index, s.response, s.tokens, s.status, s.weight_versions, len(s.rollout_log_probs))
        for s in flatten(output.samples)
    ]


async def test_streaming_gives_what_the_default_function_gives(tokenizer_dir):
    outputs = []
    for path in (None, STREAMING):
        args = arguments(tokenizer_dir, custom_generate_function_path=path)
        async with SmallEngine(length=lambda prompt, seed: 9 + seed % 8) as engine:
            outputs.append(
                rows(await generate_rollout_async(engine.serve(args), 0, source_of(args)))
            )
        assert engine.requests[0].get("stream", False) is (path is not None)
    assert outputs[0] == outputs[1]


async def test_streaming_keeps_what_has_arrived_at_an_abort(tokenizer_dir):
    from slime.plugins.agents.streaming import generate_streaming

    args = arguments(tokenizer_dir, rollout_max_response_len=2000)
    async with SmallEngine(length=lambda prompt, seed: 1500, jitter=0.0) as engine:
        state = GenerateState(engine.serve(args))
        sample = Sample(prompt="p", index=0, group_index=0)
        task = asyncio.create_task(
            generate_streaming(args, sample, {**state.sampling_params, "sampling_seed": 1})
        )
        await until(lambda: engine.parts_streamed > 50)
        state.aborted = True
        await asyncio.wait_for(task, 10)
    assert sample.status is Sample.Status.ABORTED
    assert 0 < sample.response_length < 1500
    assert sample.response_length == len(sample.response) == len(sample.rollout_log_probs)


async def test_streaming_goes_on_from_what_has_arrived_when_its_engine_is_lost(tokenizer_dir):
    args = arguments(tokenizer_dir, custom_generate_function_path=STREAMING)
    async with SmallEngine(length=lambda prompt, seed: 9) as engine:
        engine.drops = 3
        output = await generate_rollout_async(engine.serve(args), 0, source_of(args))
    lengths = [sample.response_length for sample in flatten(output.samples)]
    assert sorted(lengths) == [9] * 5 + [12] * 3, "three tokens, and nine more in another request"
    for sample in flatten(output.samples):
        assert len(sample.response) == sample.response_length == len(sample.rollout_log_probs)
        assert len(sample.weight_versions) == (2 if sample.response_length == 12 else 1)


async def test_streaming_reports_errors_of_the_server(tokenizer_dir):
    from slime.plugins.agents.streaming import generate_streaming

    asked = []

    async def refuse(request):
        asked.append(request)
        if len(asked) == 1:
            return web.Response(status=400, text="too long")
        return web.Response(text='data: {"error": {"message": "far too long"}}\n\ndata: [DONE]\n\n')

    app = web.Application()
    app.router.add_post("/generate", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        args = arguments(tokenizer_dir, sglang_router_port=runner.addresses[0][1])
        with pytest.raises(RuntimeError, match="answered 400"):
            await generate_streaming(args, Sample(prompt="p"), GenerateState(args).sampling_params)
        with pytest.raises(RuntimeError, match="too long"):
            await generate_streaming(args, Sample(prompt="p"), GenerateState(args).sampling_params)
        assert len(asked) == 2, "a refusal is not tried again"
    finally:
        await runner.cleanup()


# --- replay and sleep ------------------------------------------------------------------------


def test_forge_load_replays_dumps(tmp_path):
    template = str(tmp_path / "dump_{rollout_id}.pt")
    args = arguments(
        "unused",
        save_debug_rollout_data=template,
        load_forge_rollout_data=template,
        dump_details=None,
    )
    args.debug_rollout_only = False
    groups = [
        [Sample(index=2 * g + i, group_index=g, reward=float(i)) for i in range(2)]
        for g in range(3)
    ]
    save_rollout(4, groups, args, args)
    output = forge_load.generate_rollout(args, 4, None)
    assert [[s.index for s in g] for g in output.samples] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="rollout 5"):
        forge_load.generate_rollout(args, 5, None)
    with pytest.raises(ValueError, match="--load-forge-rollout-data"):
        forge_load.generate_rollout(arguments("unused"), 0, None)


def test_sleep_ends_at_the_deadline():
    with pytest.raises(TimeoutError, match=r"slept for 0\.05 s"):
        sleep_rollout.sleep(arguments("unused", phase_timeout=0.05), 0, None)
