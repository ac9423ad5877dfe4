"""Users' generate functions in all their forms, over the real HTTP engine; text that is tokenised
here.
"""

import asyncio
import copy
import logging
import os
import re
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from make_args import make_args
from rollout_parts import Prompts, SmallEngine, arguments, source_of

from slime.data.convert import samples_to_train_data
from slime.data.sample import Sample, flatten
from slime.observability import files
from slime.rollout import custom_generate
from slime.rollout.group import continuable
from slime.rollout.prompts import cut_at_sampled_media
from slime.rollout.sglang_rollout import (
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout_async,
    get_model_url,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hook(tmp_path):
    def write(code, name=None, file="hook.py"):
        (tmp_path / file).write_text(code)
        return f"{tmp_path / file}:{name}" if name else str(tmp_path / file)

    return write


async def roll(args, source=None, rollout_id=0):
    output = await asyncio.wait_for(
        generate_rollout_async(args, rollout_id, source or source_of(args)), 30
    )
    return output.samples


def other(path, name):
    """Another function of the same file."""
    return f"{path.rpartition(':')[0]}:{name}"


def text_of(args, ids):
    return GenerateState(args).tokenizer.decode(ids)


# --- one sample ------------------------------------------------------------------------------

# The user guide's generate function, word for word but for the names of flags.
GUIDE = """
async def my_generate(args, sample, sampling_params):
    from slime.utils.processing_utils import load_tokenizer
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    from slime.utils.http_utils import post
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {"text": sample.prompt, "sampling_params": sampling_params}
    )
    prompt_tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_tokens = tokenizer(output["text"], add_special_tokens=False)["input_ids"]
    sample.tokens = prompt_tokens + response_tokens
    sample.response_length = len(response_tokens)
    sample.response = output["text"]
    sample.truncated = output["meta_info"]["finish_reason"]["type"] == "length"
    return sample
"""


async def test_the_user_guides_function_runs_as_it_stands(tokenizer_dir, hook):
    pytest.importorskip("slime.utils.http_utils")
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(GUIDE, "my_generate"))
    async with SmallEngine(
        length=lambda prompt, seed: 20 if "prompt 1:" in prompt else 3
    ) as engine:
        groups = await roll(engine.serve(args))
    assert [s.status.value for s in flatten(groups)] == ["completed"] * 2 + ["truncated"] * 2 + [
        "completed"
    ] * 4
    data = samples_to_train_data(args, groups)
    assert "rollout_log_probs" not in data
    assert all(
        sum(mask) == length
        for mask, length in zip(data["loss_masks"], data["response_lengths"], strict=True)
    )


TEXT_ONLY = """
async def fn(args, sample, sampling_params, evaluation=False):
    sample.response = f"answer {sample.index} {evaluation}"
    return sample
async def empty(args, sample, sampling_params):
    sample.response = ""
    return sample
def plain(args, sample, sampling_params, **kwargs):
    sample.response = "plain " + str(kwargs["evaluation"])
    return sample
"""


async def test_text_alone_is_tokenised_once_with_one_warning(tokenizer_dir, hook, caplog):
    custom_generate._warned.clear()
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(TEXT_ONLY, "fn"))
    with caplog.at_level(logging.WARNING):
        groups = await roll(args)
    assert caplog.text.count("sets no tokens") == 1
    for sample in flatten(groups):
        assert text_of(args, sample.tokens) == sample.prompt + f"answer {sample.index} False"
        assert sample.response_length == len(sample.response)
        assert sample.rollout_log_probs is None and sample.loss_mask is None
        assert sample.status is Sample.Status.COMPLETED
    assert "rollout_log_probs" not in samples_to_train_data(args, groups)


async def test_an_empty_answer_is_no_token_long(tokenizer_dir, hook):
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(TEXT_ONLY, "empty"))
    for sample in flatten(await roll(args)):
        assert sample.response_length == 0 and text_of(args, sample.tokens) == sample.prompt


async def test_a_plain_function_and_keywords_are_taken(tokenizer_dir, hook):
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(TEXT_ONLY, "plain"))
    assert {sample.response for sample in flatten(await roll(args))} == {"plain False"}


TOGETHER = """
import threading
everyone = threading.Barrier(64)
def plain(args, sample, sampling_params):
    everyone.wait(timeout=50)
    sample.response = "together"
    return sample
"""


async def test_plain_functions_run_as_many_at_once_as_generations_are_in_flight(
    tokenizer_dir, hook
):
    """More than the threads of an event loop, min(32, cores + 4)."""
    path = hook(TOGETHER, "plain")
    args = arguments(
        tokenizer_dir,
        custom_generate_function_path=path,
        rollout_batch_size=32,
        n_samples_per_prompt=2,
    )
    assert {sample.response for sample in flatten(await roll(args))} == {"together"}


MULTI_TURN = """
from slime.rollout.sglang_rollout import GenerateState
async def fn(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    prompt_tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_tokens = []
    for turn in range(args.max_turns):
        model_tokens = tokenizer(f"turn {turn}", add_special_tokens=False)["input_ids"]
        sample.loss_mask += [1] * len(model_tokens)
        tool_tokens = tokenizer("tool", add_special_tokens=False)["input_ids"]
        sample.loss_mask += [0] * len(tool_tokens)
        response_tokens += model_tokens + tool_tokens
    sample.tokens = prompt_tokens + response_tokens
    sample.response_length = len(response_tokens)
    return sample
async def misaligned(args, sample, sampling_params):
    sample = await fn(args, sample, sampling_params)
    sample.loss_mask = sample.loss_mask[:-1]
    return sample
async def nothing(args, sample, sampling_params): pass
async def fan_out(args, sample, sampling_params):
    import copy
    parts = [copy.deepcopy(sample) for _ in range(3)]
    for i, part in enumerate(parts):
        part.response = f"part {i}"
    return parts
async def fan_out_strange(args, sample, sampling_params):
    parts = await fan_out(args, sample, sampling_params)
    for i, part in enumerate(parts): part.rollout_id = i
    return parts
async def list_rewards(args, samples, **kw):
    args.batches.append(len(samples))
    return [1.0] * len(samples)
"""


async def test_loss_mask_grows_in_place_and_the_response_text_is_filled_in(tokenizer_dir, hook):
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(MULTI_TURN, "fn"))
    for sample in flatten(await roll(args)):
        assert sample.loss_mask == ([1] * 6 + [0] * 4) * 3
        assert sample.response == "turn 0toolturn 1toolturn 2tool"


async def test_misaligned_fields_and_missing_results_are_errors(tokenizer_dir, hook):
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(MULTI_TURN, "misaligned"))
    with pytest.raises(ValueError, match=r"29 entries.*loss_mask.*response_length is 30"):
        await roll(args)
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(MULTI_TURN, "nothing"))
    with pytest.raises(TypeError, match=r"nothing.*NoneType"):
        await roll(args)


async def test_fan_out_shares_a_rollout_and_is_scored_in_one_call(tokenizer_dir, hook):
    path = hook(MULTI_TURN, "fan_out")
    args = arguments(
        tokenizer_dir,
        {"batches": []},
        custom_generate_function_path=path,
        custom_rm_path=other(path, "list_rewards"),
    )
    groups = await roll(args)
    assert all(len(group) == 2 and len(group[0]) == 3 for group in groups)
    assert args.batches == [3] * 8
    for group in groups:
        for siblings in group:
            assert {s.rollout_id for s in siblings} == {siblings[0].index}
    data = samples_to_train_data(args, groups)
    assert len(set(data["rollout_ids"])) == 8 and len(data["tokens"]) == 24
    args = arguments(tokenizer_dir, custom_generate_function_path=other(path, "fan_out_strange"))
    with pytest.raises(ValueError, match="different rollout_ids"):
        await roll(args)


async def test_samples_without_an_index_may_fan_out(tokenizer_dir, hook):
    """As those of the data source in the guide, which numbers only the groups."""

    class Unnumbered(type(source_of(arguments(tokenizer_dir)))):
        def get_samples(self, num_samples):
            groups = super().get_samples(num_samples)
            for sample in flatten(groups):
                sample.index = None
            return groups

    args = arguments(tokenizer_dir, custom_generate_function_path=hook(MULTI_TURN, "fan_out"))
    groups = await roll(args, Unnumbered(args, Prompts()))
    assert {sample.rollout_id for sample in flatten(groups)} == {None}
    ids = samples_to_train_data(args, groups)["rollout_ids"]
    assert ids == [number for number in range(8) for _ in range(3)]


async def test_an_aborted_fan_out_starts_over(tokenizer_dir, hook):
    code = MULTI_TURN + (
        "\n"
        "import asyncio\n"
        "async def slow_fan(args, sample, sampling_params):\n"
        "    state = GenerateState(args)\n"
        "    while sample.group_index == 0 and args.hold and not state.aborted: await "
        "asyncio.sleep(0.01)\n"
        "    return await fan_out(args, sample, sampling_params)\n"
    )
    args = arguments(
        tokenizer_dir, {"hold": True}, custom_generate_function_path=hook(code, "slow_fan"),
        over_sampling_batch_size=5, partial_rollout=True, rm_type="random",
    )  # fmt: skip
    source = source_of(args)
    async with SmallEngine() as engine:
        groups = await roll(engine.serve(args), source)
        assert [flatten(g)[0].group_index for g in groups] == [1, 2, 3, 4]
        assert [s.status.value for s in source.buffer[0]] == ["pending", "pending"]
        args.hold = False
        again = await roll(args, source, 1)
    assert flatten(again[0])[0].group_index == 0 and len(flatten(again[0])) == 6


AFTER_THE_ABORT = """
import asyncio
from slime.rollout.generate import generate
from slime.plugins.agents.conversation import Conversation
from slime.plugins.agents.streaming import generate_streaming

async def until_the_abort(args, sample):
    if sample.group_index == 0 and "held" not in sample.metadata:  # as one that asks a slow judge
        sample.metadata["held"] = True
        while not args.state_of().aborted: await asyncio.sleep(0.01)
    return sample
async def plain(args, sample, sampling_params):
    return await until_the_abort(args, await generate(args, sample, sampling_params))
async def group(args, samples):
    params = args.state_of().sampling_params
    return [await plain(args, sample, {**params, "sampling_seed": sample.index}) for sample in samples]
async def turns(args, sample, sampling_params):
    await Conversation(args, sample, sampling_params).turn()
    return await until_the_abort(args, sample)
async def failed(args, sample, sampling_params):
    await plain(args, sample, sampling_params)
    if args.state_of().aborted: sample.status = "failed"
    return sample
"""


@pytest.mark.parametrize("name", ["plain", "group", "turns", "failed"])
async def test_nothing_is_generated_after_the_end_of_a_response_that_was_finished_at_the_abort(
    tokenizer_dir, hook, name
):
    args = arguments(
        tokenizer_dir, {"state_of": None}, over_sampling_batch_size=5, partial_rollout=True,
        rollout_max_response_len=40, custom_generate_function_path=hook(AFTER_THE_ABORT, name),
    )  # fmt: skip
    args.state_of = partial(GenerateState, args)
    source = source_of(args)
    async with SmallEngine(jitter=0.0, length=lambda prompt, seed: 6) as engine:
        assert [group[0].group_index for group in await roll(engine.serve(args), source)] == [
            1,
            2,
            3,
            4,
        ]
        back = flatten(source.buffer)
        assert {sample.status for sample in back} == {Sample.Status.ABORTED} and len(back) == 2
        assert {sample.response_length for sample in back} == ({6} if name == "turns" else {0})
        trained = await roll(args, source, 1)
    first = flatten(trained[0])
    assert [sample.group_index for sample in first] == [0, 0]
    assert all(
        s.response_length == 6 == len(s.response) and s.status is Sample.Status.COMPLETED
        for s in first
    )


async def test_a_streamed_response_that_ended_before_the_abort_is_kept(tokenizer_dir, monkeypatch):
    """The abort comes between the last token and the return of the function."""
    args = arguments(
        tokenizer_dir,
        partial_rollout=True,
        custom_generate_function_path="slime.rollout.sglang_streaming_rollout.generate_streaming",
    )
    module = sys.modules[generate.__module__]  # not the function of the same name
    state, append = GenerateState(args), module.append_output

    def append_and_abort(*given):
        append(*given)
        state.aborted = True

    monkeypatch.setattr(module, "append_output", append_and_abort)
    sample = Sample(prompt="p", index=0, group_index=0)
    async with SmallEngine(jitter=0.0, length=lambda prompt, seed: 6) as engine:
        await generate_and_rm(
            engine.serve(args), sample, {**state.sampling_params, "sampling_seed": 1}
        )
    assert state.aborted
    assert (
        sample.status is Sample.Status.COMPLETED
        and sample.response_length == 6
        and sample.reward is not None
    )


# --- the list form ---------------------------------------------------------------------------

# The training guide's file, with the helpers that it leaves to the user.
CUSTOM_GENERATE = '''
async def generate_single(conversation):
    calls = sum(m["role"] == "assistant" for m in conversation)
    return "use tool" if calls < 2 else f"done after {len(conversation)}"
def extract_tool_call(response):
    return "tool" if response == "use tool" else None
def execute_tool(tool_call):
    return "tool says 5"
def compute_reward(sample):
    return float("done" in sample.response)

async def custom_generate(args, samples, evaluation=False):
    """Multi-turn generation with tool calling."""
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            # Generate response
            response = await generate_single(conversation)
            # Check for tool call
            tool_call = extract_tool_call(response)
            if tool_call:
                tool_result = execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                break
        sample.response = response
        sample.reward = compute_reward(sample)
    return samples
'''


def question(i):
    return [{"role": "user", "content": f"q{i}"}]


@pytest.mark.parametrize("max_turns", [3, 2])
async def test_the_training_guides_custom_generate_runs_as_it_stands(
    tokenizer_dir, hook, max_turns
):
    args = arguments(
        tokenizer_dir,
        custom_generate_function_path=hook(CUSTOM_GENERATE, file="custom_generate.py"),
        max_turns=max_turns,
    )
    groups = await roll(args, source_of(args, Prompts(prompt=question)))
    assert len(groups) == 4
    for sample in flatten(groups):
        number = sample.metadata["number"]
        assert sample.prompt == question(number), "the prompt stays as it was given"
        last = "done after 5" if max_turns == 3 else "use tool"
        text = text_of(args, sample.tokens)
        history = "use tool</><tool>tool says 5</><assistant>" * (max_turns - 1)
        assert text == f"<user>q{number}</><assistant>" + history + last
        trained = "".join(
            text_of(args, [token])
            for token, mask in zip(
                sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True
            )
            if mask
        )
        assert trained == "use tool</>" * (max_turns - 1) + last
        assert sample.reward == float(max_turns == 3)
        assert sample.rollout_log_probs is None
    assert len(samples_to_train_data(args, groups)["tokens"]) == 8


LISTS = """
async def in_place(args, samples):
    args.calls.append([s.index for s in samples])
    for s in samples: s.response = "x"
async def short(args, samples): return samples[:1]
"""


async def test_the_list_form_gets_a_whole_group_and_may_change_it_in_place(tokenizer_dir, hook):
    args = arguments(
        tokenizer_dir, {"calls": []}, custom_generate_function_path=hook(LISTS, "in_place")
    )
    groups = await roll(args)
    assert sorted(args.calls) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {sample.response for sample in flatten(groups)} == {"x"}
    args = arguments(tokenizer_dir, custom_generate_function_path=hook(LISTS, "short"))
    with pytest.raises(TypeError, match=r"1 results.*2 samples"):
        await roll(args)


REFUSED = """
from slime.utils.http_utils import HttpError
TOO_LONG = "The input is longer than the model's context length"
async def one(args, sample, sampling_params):
    sample.response = "x"
    if sample.index % 3 == 0: raise HttpError(f"POST answered 400: {TOO_LONG}", 400)
    return sample
async def listed(args, samples):
    for sample in samples: sample.response = "x"
    if samples[0].group_index == 0: raise HttpError(f"POST answered 400: {args.why or TOO_LONG}", 400)
"""


async def test_a_sample_that_became_too_long_is_trained_on_no_token(tokenizer_dir, hook):
    """It had no tokens at all, so its whole group could not be converted."""
    args = arguments(
        tokenizer_dir, n_samples_per_prompt=3, custom_generate_function_path=hook(REFUSED, "one")
    )
    groups = await roll(args)
    data = samples_to_train_data(args, groups)
    assert [int(mask.sum()) for mask in data["loss_masks"]] == [0, 1, 1] * 4
    assert [sample.response_length for sample in flatten(groups)] == [0, 1, 1] * 4


async def test_a_group_of_the_list_form_that_became_too_long_is_dropped(tokenizer_dir, hook):
    more = {"custom_generate_function_path": hook(REFUSED, "listed")}
    assert [
        group[0].group_index for group in await roll(arguments(tokenizer_dir, {"why": ""}, **more))
    ] == [1, 2, 3, 4]
    with pytest.raises(custom_generate.HttpError, match="top_p"):
        await roll(arguments(tokenizer_dir, {"why": "top_p must be in (0, 1]"}, **more))


RAISES = """
import asyncio, json
from slime.rollout.sglang_rollout import generate as one_turn
async def one(args, sample, sampling_params):
    sample = await one_turn(args, sample, sampling_params)
    if sample.index == 4: json.loads("{oops")
    return sample
async def late(args, sample, sampling_params):
    sample.response = "x"
    if sample.index == 4: await asyncio.wait_for(asyncio.sleep(60), 0.01)
    return sample
async def listed(args, samples):
    for sample in samples: sample.response = "x"
    if samples[0].group_index == 1: raise OSError("no such tool")
"""


@pytest.mark.parametrize(("name", "error"), [("one", ValueError), ("late", TimeoutError)])
async def test_an_exception_of_a_generate_function_costs_its_sample(
    tokenizer_dir, hook, name, error
):
    """A tool that raised at what the model had written ended the run."""
    path = hook(RAISES, name)
    more = {"n_samples_per_prompt": 3, "custom_generate_function_path": path}
    async with SmallEngine() as engine:
        args = engine.serve(arguments(tokenizer_dir, reward_max_error_share=0.1, **more))
        groups = await roll(args)
        bad = next(sample for sample in flatten(groups) if sample.index == 4)
        assert bad.status is Sample.Status.FAILED and bad.remove_sample and bad.reward is None
        assert re.search(r"Error: .*hook\.py:\d+\)$", bad.metadata["reward_failure"])
        trained = [
            int(mask.sum() > 0) for mask in samples_to_train_data(args, groups)["loss_masks"]
        ]
        assert trained == [sample is not bad for sample in flatten(groups)]
        args = engine.serve(arguments(tokenizer_dir, reward_max_error_share=0.0, **more))
        with pytest.raises(error):
            await roll(args)


async def test_an_exception_of_the_list_form_costs_its_group(tokenizer_dir, hook):
    more = {"custom_generate_function_path": hook(RAISES, "listed"), "reward_max_error_share": 0.3}
    groups = await roll(arguments(tokenizer_dir, **more))
    assert [group[0].group_index for group in groups] == [0, 2, 3, 4]


async def test_a_template_that_rewrites_history_trains_the_last_answer_only(tokenizer_dir):
    from slime.rollout.custom_generate import split_conversation_ids

    class Forgetful:
        """A template that shows how many messages there are, so that no conversation begins like
        its continuation.
        """

        chat_template = "a text of its own: what templates take is remembered by it"

        def __init__(self, inner):
            self.inner = inner

        def __call__(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

        def apply_chat_template(self, messages, **kwargs):
            return f"{len(messages)}" + self.inner.apply_chat_template(messages, **kwargs)

    args = arguments(tokenizer_dir)
    tokenizer = Forgetful(GenerateState(args).tokenizer)
    sample = Sample(prompt=question(1), response="end")
    turns = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    prompt, response, mask = split_conversation_ids(tokenizer, sample, question(1) + turns)
    assert text_of(args, prompt) == "3<user>q1</><assistant>a</><tool>b</><assistant>"
    assert text_of(args, response) == "end" and mask == [1, 1, 1]


# --- pieces that users call ------------------------------------------------------------------


async def test_generate_and_rm_leaves_finished_samples_alone(tokenizer_dir):
    args = arguments(tokenizer_dir)
    done = Sample(status=Sample.Status.TRUNCATED, reward=0.5, response="x")
    assert await generate_and_rm(args, done, {}) is done and done.reward == 0.5
    with pytest.raises(ValueError, match="'random' returned None"):
        await generate_and_rm(args, Sample(status=Sample.Status.COMPLETED), {})
    group = [
        Sample(status=Sample.Status.COMPLETED, reward=1.0),
        Sample(status=Sample.Status.COMPLETED, reward=0.0),
    ]
    assert await generate_and_rm_group(args, group, GenerateState(args).sampling_params) == group


async def test_generate_has_nothing_to_do_for_finished_samples_or_no_room(tokenizer_dir):
    args = arguments(tokenizer_dir)
    with pytest.raises(ValueError, match="nothing left"):
        await generate(
            args, Sample(status=Sample.Status.COMPLETED), GenerateState(args).sampling_params
        )
    full = Sample(prompt="x" * 20)
    args = arguments(tokenizer_dir, rollout_max_context_len=20)
    assert (
        await generate(args, full, GenerateState(args).sampling_params)
    ).status is Sample.Status.TRUNCATED


async def test_message_prompts_are_rendered_with_tools_and_template_arguments(tokenizer_dir):
    args = arguments(tokenizer_dir)
    async with SmallEngine() as engine:
        await roll(engine.serve(args), source_of(args, Prompts(prompt=question)))
    texts = {text_of(args, request["input_ids"]) for request in engine.requests}
    assert texts == {f"<user>q{i}</><assistant>" for i in range(4)}


async def test_group_rewards_are_asked_once_a_group(tokenizer_dir, hook):
    path = hook(MULTI_TURN, "list_rewards")
    args = arguments(tokenizer_dir, {"batches": []}, group_rm=True, custom_rm_path=path)
    async with SmallEngine() as engine:
        groups = await roll(engine.serve(args))
    assert args.batches == [2] * 4 and {s.reward for s in flatten(groups)} == {1.0}


async def test_a_class_style_reward_model_scores_groups_in_batches(tokenizer_dir, hook):
    code = (
        "class CustomRewardModel:\n"
        "    def __init__(self, model_path=None): pass\n"
        "    def compute_reward(self, prompts, responses, labels, metadata):\n"
        "        import os\n"
        "        assert [m['number'] for m in metadata] == [int(label) for label in labels]\n"
        "        return [{'score': float(len(r)), 'batch': len(prompts), 'pid': os.getpid()} for "
        "r in responses]\n"
        "def helper(): pass\n"
    )
    args = arguments(
        tokenizer_dir,
        custom_rm_path=hook(code, file="custom_rm.py"),
        rm_model_path=None,
        reward_key="score",
    )
    async with SmallEngine() as engine:
        groups = await roll(engine.serve(args))
    rewards = [s.reward for s in flatten(groups)]
    assert [r["score"] for r in rewards] == [len(s.response) for s in flatten(groups)]
    assert {r["batch"] for r in rewards} == {2}
    assert len({r["pid"] for r in rewards} - {os.getpid()}) == 1, "one process of its own"


async def test_per_sample_overrides_of_generate_and_reward(tokenizer_dir, hook):
    path = hook(TEXT_ONLY + "\nasync def rm(args, sample, **kw): return 7.0\n", "plain")

    class Mixed(Prompts):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            if i % 2:
                sample.generate_function_path, sample.custom_rm_path = path, other(path, "rm")
            return sample

    args = arguments(tokenizer_dir)
    async with SmallEngine() as engine:
        groups = await roll(engine.serve(args), source_of(args, Mixed()))
    for sample in flatten(groups):
        own = sample.metadata["number"] % 2
        assert (sample.response == "plain False") == bool(own)
        assert (sample.reward == 7.0) == bool(own)
    assert len(engine.requests) == 4


def test_model_urls():
    args = arguments("unused", sglang_router_ip="h", sglang_router_port=5)
    assert get_model_url(args) == "http://h:5/generate"
    assert get_model_url(args, path="/health") == "http://h:5/health"
    args.sglang_model_routers = {"judge": ("j", 6)}
    assert get_model_url(args, "judge") == "http://j:6/generate"
    with pytest.raises(ValueError, match=r"models.*judge"):
        get_model_url(args, "other")
    args.sglang_router_ip = None
    with pytest.raises(ValueError, match="no engine"):
        get_model_url(args)


async def test_images_go_to_the_engine_as_data(tokenizer_dir, tmp_path):
    PIL = pytest.importorskip("PIL.Image")
    from slime.rollout.prompts import add_media

    PIL.new("RGB", (2, 2)).save(tmp_path / "a.png")
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/a.png"
    as_data = "data:image/png;base64,AAAA"
    sample = Sample(
        multimodal_inputs={"images": [PIL.new("RGB", (2, 2)), url, as_data], "audio": [b"ab"]}
    )
    fields = {}
    add_media(fields, sample)
    server.shutdown()
    server.server_close()
    first, fetched, given = fields["image_data"]
    assert first == fetched and first.startswith("data:image/png;base64,") and given == as_data
    assert fields["audio_data"] == ["data:audio/unknown;base64,YWI="]


@pytest.mark.parametrize(("tokens", "told"), [(10, False), (9, True)])
async def test_an_engine_that_reads_other_tokens_beside_media_is_told_once(
    tokenizer_dir, tokens, told
):
    """SGLang gets such samples as text; this engine counts 10 tokens whatever it is sent."""
    files.take_warnings()
    async with SmallEngine() as engine:
        args = engine.serve(arguments(tokenizer_dir, rollout_backend="sglang"))
        params = {**GenerateState(args).sampling_params, "sampling_seed": 1}
        for index in range(2):
            image = {"images": ["data:image/png;base64,AAAA"]}
            sample = Sample(
                index=index, prompt="What is it?", multimodal_inputs=image, tokens=[5] * tokens
            )
            assert (await generate(args, sample, params)).num_tokens > tokens
        assert (await generate(args, Sample(index=2, prompt="a"), params)).response_length
    found = [f"sample 0 has media and {tokens} tokens" in line for line in files.take_warnings()]
    assert found == [True] * told


@pytest.mark.parametrize(
    "prompt", ["What is it?", [{"role": "user", "content": [{"type": "image"}]}]]
)
def test_an_image_for_a_text_model_is_told(tokenizer_dir, prompt):
    from slime.rollout.prompts import prompt_ids

    args = arguments(tokenizer_dir)
    state = GenerateState(args)
    with pytest.raises(ValueError, match=r"sample 7.*--hf-checkpoint"):
        prompt_ids(
            state, Sample(index=7, prompt=prompt, multimodal_inputs={"images": ["picture.png"]})
        )


def test_an_image_token_that_the_model_writes_ends_the_response(tmp_path):
    """Nothing could be put in its place when the trainer scores it; one in a tool's answer has its
    features.
    """
    (tmp_path / "config.json").write_text(
        '{"image_token_index": 7, "text_config": {"vocab_size": 9}}'
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    args = make_args().with_values(
        hf_checkpoint=str(tmp_path), rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_stop=None,
        rollout_max_response_len=9, rollout_stop_token_ids=[3], rollout_skip_special_tokens=False,
    )  # fmt: skip
    state = GenerateState(args)
    assert state.sampling_params["stop_token_ids"] == [3, 7]
    state.tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(map(str, ids))
    )
    sample = Sample(tokens=[1, 7], response="")
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-1.0, -2.0], text="45")
    sample.append_response_tokens(tokens=[7, 2], log_probs=None, trainable=False, text="<image>2")
    before = copy.deepcopy(sample)
    cut_at_sampled_media(state, sample)
    assert sample == before, "the prompt's and the tool's images stay"
    finish = {"finish_reason": {"type": "stop", "matched": 7}}
    sample.append_response_tokens(
        tokens=[6, 7], log_probs=[-3.0, -4.0], text="6<image>", meta_info=finish
    )
    assert sample.status is Sample.Status.COMPLETED
    cut_at_sampled_media(state, sample)
    assert (
        sample.tokens == [1, 7, 4, 5, 7, 2, 6]
        and sample.response_length == 5
        and sample.response == "45726"
    )
    assert sample.loss_mask == [1, 1, 0, 0, 1] and sample.rollout_log_probs == [
        -1.0,
        -2.0,
        0.0,
        0.0,
        -3.0,
    ]
    assert sample.status is Sample.Status.TRUNCATED


def test_a_response_that_is_discarded_leaves_no_media_behind() -> None:
    """An image that an environment added belongs to the response, and a prompt has no placeholder
    for it.
    """
    before = Sample(index=0, prompt="look", multimodal_inputs={"images": ["of the prompt"]})
    after = Sample(
        index=0, prompt="look", multimodal_inputs={"images": ["of the prompt", "of a tool"]}
    )
    after.status = Sample.Status.ABORTED
    (kept,) = flatten(continuable([after], [before], partial=True))
    assert kept is after and kept.multimodal_inputs == {"images": ["of the prompt"]}
