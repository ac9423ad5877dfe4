"""Generate functions in the shapes of public plug-ins, over the real HTTP engine and through the
conversion.

The functions were written for these tests; each has the form in which one published plug-in uses
``Sample``.
"""

import asyncio

import numpy as np
import pytest
from rollout_parts import SmallEngine, arguments, source_of

from slime.cluster.rollout_state import RolloutState
from slime.data.convert import samples_to_train_data
from slime.data.sample import Sample, flatten
from slime.rollout.sglang_rollout import GenerateState, generate_rollout_async

pytestmark = pytest.mark.timeout(60)

COMMON = """
import copy
import numpy as np
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TOOL = " [tool] "

async def ask(args, ids, params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": ids, "sampling_params": params, "return_logprob": True})
    scored = output["meta_info"]["output_token_logprobs"]
    return output, [item[1] for item in scored], [item[0] for item in scored]

def encode(args, text):
    return GenerateState(args).tokenizer(text, add_special_tokens=False)["input_ids"]
"""

# The form of search-r1: observations by append_response_tokens, positional args, no log_probs.
SEARCH = (
    COMMON
    + """
async def fn(args, sample, sampling_params):
    sample.tokens = encode(args, sample.prompt)
    for turn in range(3):
        output, ids, log_probs = await ask(args, sample.tokens, sampling_params)
        sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=output["meta_info"])
        sample.response += output["text"]
        if turn < 2:
            sample.append_response_tokens(args, tokens=encode(args, TOOL), trainable=False)
            sample.response += TOOL
    return sample
"""
)

# The form of retool: names of its own for the lists, given back at the end.
RETOOL = (
    COMMON
    + """
async def fn(args, sample, sampling_params):
    sample.tokens = encode(args, sample.prompt)
    sample.loss_mask = []
    loss_masks, tokens = sample.loss_mask, sample.tokens
    response = ""
    for turn in range(2):
        output, ids, log_probs = await ask(args, tokens, sampling_params)
        sample.append_response_tokens(args, tokens=ids, log_probs=log_probs)
        sample.append_response_tokens(args, tokens=encode(args, TOOL), trainable=False)
        response += output["text"] + TOOL
    sample.append_response_tokens(args, meta_info=output["meta_info"])
    sample.loss_mask = loss_masks
    sample.response = response
    return sample

async def emptied(args, sample, sampling_params):
    sample = await fn(args, sample, sampling_params)
    sample.loss_mask = []
    return sample
"""
)


async def roll(args, source=None, rollout_id=0):
    output = await asyncio.wait_for(
        generate_rollout_async(args, rollout_id, source or source_of(args)), 30
    )
    return output.samples


def text_of(args, ids):
    return GenerateState(args).tokenizer.decode(ids)


@pytest.fixture
def plugin(tmp_path):
    def write(code, name="fn"):
        (tmp_path / "plugin.py").write_text(code)
        return f"{tmp_path / 'plugin.py'}:{name}"

    return write


@pytest.mark.parametrize(
    ("code", "turns", "tools"), [(SEARCH, 3, 2), (RETOOL, 2, 2)], ids=["search", "retool"]
)
async def test_tool_output_is_not_trained(tokenizer_dir, plugin, code, turns, tools):
    args = arguments(tokenizer_dir, custom_generate_function_path=plugin(code))
    async with SmallEngine() as engine:
        groups = await roll(engine.serve(args))
    data = samples_to_train_data(args, groups)
    assert len(engine.requests) == 8 * turns
    for sample, tokens, mask in zip(
        flatten(groups), data["tokens"], data["loss_masks"], strict=True
    ):
        response = tokens[len(tokens) - sample.response_length :]
        masked = text_of(args, [t for t, m in zip(response, mask, strict=True) if not m])
        assert masked == " [tool] " * tools, (
            "tool output, and nothing else, is left out of the loss"
        )
        assert sample.response == text_of(args, response.tolist())
        assert 0 < mask.sum() < len(mask) and sample.status is Sample.Status.COMPLETED
    assert len(data["rollout_log_probs"]) == 8


async def test_an_empty_mask_never_means_all_tokens(tokenizer_dir, plugin):
    args = arguments(tokenizer_dir, custom_generate_function_path=plugin(RETOOL, "emptied"))
    async with SmallEngine() as engine:
        with pytest.raises(ValueError, match=r"0 entries.*loss_mask"):
            await roll(engine.serve(args))


# The form of tau-bench: a result of its own that becomes a new Sample, its status a string.
FRESH = (
    COMMON
    + """
def result(args, sample, **more):
    prompt, ids = encode(args, sample.prompt), encode(args, "done")
    return Sample(prompt=sample.prompt, tokens=prompt + ids, response="done", response_length=len(ids),
                  loss_mask=[1] * len(ids), reward=1.0, status="completed", metadata=None, **more)

async def one(args, sample, sampling_params):
    return result(args, sample, index=sample.index)

async def listed(args, sample, sampling_params):
    return [result(args, sample)]

async def two(args, sample, sampling_params):
    return [result(args, sample), result(args, sample)]
"""
)


@pytest.mark.parametrize(("name", "samples"), [("one", 8), ("listed", 8), ("two", 16)])
async def test_new_samples_belong_to_the_group_that_was_asked_for(
    tokenizer_dir, plugin, tmp_path, name, samples
):
    args = arguments(
        tokenizer_dir, custom_generate_function_path=plugin(FRESH, name), save_interval=1, save=None,
        debug_rollout_only=False, load_debug_rollout_data=None, replay_schedule=None,
        rollout_function_path="slime.rollout.sglang_rollout.generate_rollout",
    )  # fmt: skip
    source = source_of(args)
    state = RolloutState(args, tmp_path, source)
    GenerateState(args).observer = state.observe
    output = await asyncio.wait_for(generate_rollout_async(args, 0, source), 30)
    leaves = flatten(output.samples)
    assert len(leaves) == samples and {leaf.group_index for leaf in leaves} == {0, 1, 2, 3}
    assert {leaf.index for leaf in leaves} == set(range(8))
    assert {leaf.status for leaf in leaves} == {Sample.Status.COMPLETED} and leaves[
        0
    ].metadata == {}
    assert leaves[0].to_dict()["status"] == "completed"
    from slime.cluster.rollout_state import Rollout

    state.complete(0, Rollout(output.samples, {}, 1.0))
    state.close_account(0)  # raises where a group is open that nobody has
    assert len(samples_to_train_data(args, output.samples)["tokens"]) == samples


# The form of codev-t1: nothing is generated for a prompt that is too long.
EMPTY = (
    COMMON
    + """
async def fn(args, sample, sampling_params):
    ids = encode(args, sample.prompt)
    if sample.index % 2:
        sample.tokens, sample.response, sample.response_length = ids, "", 0
        sample.loss_mask, sample.reward, sample.status = [], 0.0, Sample.Status.TRUNCATED
        return sample
    output, new, log_probs = await ask(args, ids, sampling_params)
    sample.tokens, sample.response, sample.response_length = ids + new, output["text"], len(new)
    sample.loss_mask, sample.rollout_log_probs = np.ones(len(new), bool), np.array(log_probs, np.float32)
    sample.reward = 1.0
    return sample

async def no_text(args, sample, sampling_params):
    sample.reward = 0.0
    return sample
"""
)


async def test_an_empty_response_stays_empty(tokenizer_dir, plugin):
    args = arguments(
        tokenizer_dir,
        custom_generate_function_path=plugin(EMPTY),
        use_tis=True,
        explicit={"use_tis"},
    )
    async with SmallEngine() as engine:
        groups = await roll(engine.serve(args))
    data = samples_to_train_data(args, groups)
    for i, sample in enumerate(flatten(groups)):
        empty = i % 2 == 1
        assert (sample.response_length == 0) == empty and (sample.response == "") == empty
        assert data["loss_masks"][i].tolist() == [1] * sample.response_length
        assert len(data["rollout_log_probs"][i]) == sample.response_length
        if empty:
            assert (
                sample.status is Sample.Status.TRUNCATED
                and text_of(args, sample.tokens) == sample.prompt
            )


async def test_a_function_that_says_nothing_gives_an_empty_response(tokenizer_dir, plugin):
    args = arguments(tokenizer_dir, custom_generate_function_path=plugin(EMPTY, "no_text"))
    for sample in flatten(await roll(args)):
        assert text_of(args, sample.tokens) == sample.prompt and sample.response_length == 0


# The form of older retool versions: an abort in a later turn leaves half of the fields filled in.
ABORTED = (
    COMMON
    + """
async def fn(args, sample, sampling_params):
    log_probs = [-0.5, -0.5]
    if args.cut:
        sample.rollout_log_probs, sample.loss_mask = log_probs, [1]
        sample.status = "aborted"
        return sample
    ids = encode(args, sample.prompt)
    sample.tokens, sample.response_length, sample.rollout_log_probs = ids + ids[:2], 2, log_probs
    return sample
"""
)


async def test_a_half_filled_aborted_sample_starts_again(tokenizer_dir, plugin):
    from slime.rollout.sglang_rollout import generate_and_rm

    args = arguments(tokenizer_dir, {"cut": True}, custom_generate_function_path=plugin(ABORTED))
    sample = Sample(prompt="p: ", group_index=0, index=0, label="1")
    result = await generate_and_rm(args, sample, GenerateState(args).sampling_params)
    assert result.status is Sample.Status.ABORTED and result.response_length == 0
    assert result.rollout_log_probs is None and result.loss_mask is None and result.tokens == []
    args.cut = False
    result = await generate_and_rm(args, result, GenerateState(args).sampling_params)
    assert result.status is Sample.Status.COMPLETED and result.rollout_log_probs == [-0.5, -0.5]


async def test_a_mask_that_is_no_sequence_of_numbers_is_named(tokenizer_dir, plugin):
    code = COMMON + (
        "\nasync def fn(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length = encode(args, sample.prompt), 1\n"
        "    sample.loss_mask = np.ones((1, 1))\n    return sample\n"
    )
    args = arguments(tokenizer_dir, custom_generate_function_path=plugin(code))
    with pytest.raises(ValueError, match=r"loss_mask.*2 dimensions"):
        await roll(args)


def test_unfilled_masks_train_all_tokens_and_empty_ones_are_errors():
    args = arguments("unused", advantage_estimator="grpo")
    unfilled = Sample(group_index=0, index=0, tokens=[1, 2], response_length=1, reward=1.0)
    assert samples_to_train_data(args, [[unfilled]])["loss_masks"][0].tolist() == [1]
    unfilled.loss_mask = []
    with pytest.raises(ValueError, match="0 entries"):
        samples_to_train_data(args, [[unfilled]])
    unfilled.loss_mask = np.array([False])
    assert samples_to_train_data(args, [[unfilled]])["loss_masks"][0].tolist() == [0]


# The form of most functions: the error of a request is not caught.
REFUSED = (
    COMMON
    + """
from slime.utils.http_utils import HttpError
async def fn(args, sample, sampling_params):
    sample.append_response_tokens(args, tokens=[1, 2], trainable=False)
    raise HttpError(f"POST answered 400: {args.why}", 400)
"""
)


async def test_a_conversation_that_grows_too_long_fails_alone(tokenizer_dir, plugin):
    from slime.engines.http import HttpError
    from slime.rollout.rm_hub.outcome import is_too_long
    from slime.rollout.sglang_rollout import generate_and_rm

    why = "The input is longer than the model's context length"
    args = arguments(tokenizer_dir, {"why": why}, custom_generate_function_path=plugin(REFUSED))
    sample = Sample(prompt="p: ", group_index=0, index=0, label="1")
    result = await generate_and_rm(args, sample, GenerateState(args).sampling_params)
    assert is_too_long(result) and result.remove_sample and result.response_length == 0
    assert GenerateState(args).tokenizer.decode(result.tokens) == "p: "
    args.why = "top_p must be in (0, 1]"
    with pytest.raises(HttpError, match="top_p"):
        await generate_and_rm(
            args, Sample(prompt="p: ", index=0), GenerateState(args).sampling_params
        )
