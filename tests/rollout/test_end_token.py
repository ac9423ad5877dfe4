"""The text of a response ends before the token that ended it, whichever end token that is; its
tokens stay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import arguments, make_tokenizer

from slime.data.sample import Sample
from slime.plugins.agents.conversation import Conversation
from slime.plugins.agents.trajectory import Tree, Turn
from slime.rollout import generate as generate_module
from slime.rollout.custom_generate import call_single
from slime.rollout.generate import append_output
from slime.rollout.rm_hub import async_rm
from slime.rollout.state import GenerateState
from slime.types import Tokenizer

ENDS = ("<eos>", "<|im_end|>", "<|eot_id|>", "</s>", "<|user|>")
INSIDE = "<|tool|>"  # a special token that ends nothing
NAMED = "<|stop|>"  # a special token at which only a request stops
PLAIN = "</call>"  # a token that is not special, at which a request may stop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a model with five end tokens: the tokenizer, config.json and
    generation_config.json name different ones."""
    from transformers import AddedToken, AutoTokenizer

    made = make_tokenizer(tmp_path_factory.mktemp("ends"))
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_special_tokens({"additional_special_tokens": [*ENDS[1:4], INSIDE, NAMED]})
    tokenizer.add_tokens([AddedToken(ENDS[4], special=False), AddedToken(PLAIN, special=False)])
    tokenizer.save_pretrained(made)
    ids = tokenizer.convert_tokens_to_ids
    (made / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": ids(ENDS[1])})
    )
    listed = {"eos_token_id": [ids(end) for end in ENDS[1:]]}
    (made / "generation_config.json").write_text(json.dumps(listed))
    return made


def reply(
    tokenizer: Tokenizer, text: str, finish: str = "stop", skip: bool = False
) -> dict[str, Any]:
    """What an engine says to a request with ``no_stop_trim``."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    reason = {"type": finish, "matched": ids[-1]} if finish == "stop" else {"type": finish}
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "finish_reason": reason,
    }
    return {"text": tokenizer.decode(ids, skip_special_tokens=skip), "meta_info": meta}


def said(folder: Path, text: str, finish: str = "stop", **more: Any) -> Sample:
    args = arguments(folder, **more)
    sample = Sample(prompt="q")
    skip = args.rollout_skip_special_tokens
    append_output(
        GenerateState(args), sample, reply(GenerateState(args).tokenizer, text, finish, skip)
    )
    return sample


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_text_ends_before_every_end_token_and_the_tokens_stay(
    folder: Path, end: str, finish: str
) -> None:
    args = arguments(folder)
    tokenizer, sample = GenerateState(args).tokenizer, said(folder, f"Paris{end}", finish)
    assert sample.response == "Paris"
    assert tokenizer.decode(sample.tokens) == f"Paris{end}"
    assert (
        sample.response_length
        == len(sample.tokens)
        == len(sample.loss_mask)
        == len(sample.rollout_log_probs)
    )


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        (f"a {INSIDE} b<eos>", "stop", f"a {INSIDE} b"),
        (f"a{NAMED}", "stop", "a"),  # the request's own end token
        (f"a{PLAIN}", "stop", f"a{PLAIN}"),  # what a request stops at, but the model says
        (f"a{INSIDE}", "length", f"a{INSIDE}"),
        ("Paris", "length", "Paris"),
        ("Paris<eos>", "abort", "Paris<eos>"),  # more text follows
        ("a<eos><eos>", "stop", "a<eos>"),
        ("<eos>", "stop", ""),
    ],
)
def test_only_an_end_token_at_the_end_is_left_out(
    folder: Path, text: str, finish: str, expected: str
) -> None:
    assert said(folder, text, finish).response == expected


def test_special_tokens_inside_a_text_are_left_out_only_if_the_run_asks_for_it(
    folder: Path,
) -> None:
    assert said(folder, f"a{INSIDE} b<eos>", rollout_skip_special_tokens=True).response == "a b"
    assert said(folder, f"a{INSIDE} b</s>").response == f"a{INSIDE} b"


def test_a_response_that_was_interrupted_before_its_end_token(folder: Path) -> None:
    args = arguments(folder)
    tokenizer, sample = GenerateState(args).tokenizer, Sample(prompt="q")
    append_output(GenerateState(args), sample, reply(tokenizer, "Paris", "abort"))
    append_output(GenerateState(args), sample, reply(tokenizer, "<|im_end|>"))
    assert sample.response == "Paris" and tokenizer.decode(sample.tokens) == "Paris<|im_end|>"


class Engine:
    """Answers requests in order."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)

    async def __call__(self, state: GenerateState, sample: Sample, body: Any) -> dict[str, Any]:
        return reply(
            self.tokenizer, self.texts.pop(0), skip=body["sampling_params"]["skip_special_tokens"]
        )


@pytest.mark.parametrize("observed", [True, False])
async def test_turns_are_what_the_model_said_and_the_conversation_keeps_its_end_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, observed: bool
) -> None:
    args = arguments(folder, rollout_max_response_len=200)
    state = GenerateState(args)
    monkeypatch.setattr(
        generate_module, "ask_engine", Engine(state.tokenizer, "one<|im_end|>", "two<eos>")
    )
    talk = Conversation(args, Sample(prompt="q"), state.sampling_params)
    assert await talk.turn() == "one"
    if observed:
        assert talk.observe("[tool]") and talk.observe("[more]")
    else:
        assert talk.reply([{"role": "user", "content": "next"}])
    assert await talk.turn() == "two"
    sample = talk.sample
    assert [turn["text"] for turn in talk.turns] == ["one", "two"]
    assert sample.response == state.tokenizer.decode(sample.tokens[-sample.response_length : -1])
    assert sample.response.startswith("one<|im_end|>")


def test_an_agents_conversation_ends_before_the_last_end_token(folder: Path) -> None:
    args = arguments(folder)
    state = GenerateState(args)
    encode, answer = state.tokenizer.encode, {"role": "assistant", "content": "a"}
    first = Turn(None, [], [], answer, encode("q"), [reply(state.tokenizer, "a</s>")], "1")
    more = [{"role": "user", "content": "b"}]
    last = Turn(first, more, [], answer, encode("b"), [reply(state.tokenizer, "c</s>")], "2")
    tree = Tree()
    tree.add(first)
    tree.add(last)
    (sample,) = tree.samples(state, Sample(prompt="q"))
    assert sample.response == "a</s>bc" and sample.tokens == encode("qa</s>bc</s>")


async def test_the_text_of_tokens_that_a_function_set_ends_before_the_end_token(
    folder: Path,
) -> None:
    async def own(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        sample.tokens, sample.response_length = (
            GenerateState(args).tokenizer.encode("qParis<|eot_id|>"),
            6,
        )
        return sample

    args = arguments(folder)
    made = await call_single(own, GenerateState(args), Sample(prompt="q"), {}, False)
    assert isinstance(made, Sample) and made.response == "Paris" and len(made.tokens) == 7


@pytest.mark.parametrize(
    "end", [*ENDS[:4], "<|user|>", "<|im_end|>\n", "<|im_end|><eos>", "<|end_of_text|>"]
)
@pytest.mark.parametrize(
    ("rm_type", "text", "label", "paid"),
    [
        ("f1", "Paris", "Paris", 1.0),
        ("boxed_f1", r"\boxed{Paris}", "Paris", 1.0),
        ("dapo", "Answer: 12", "12", 1.0),
        ("math", r"\boxed{12}", "12", 1.0),
        ("gpqa", "answer: B", "B", 1.0),
        ("last_number", "12", "12", 1.0),
    ],
)
async def test_every_built_in_type_reads_a_text_of_a_users_function_without_its_end_token(
    folder: Path, end: str, rm_type: str, text: str, label: str, paid: float
) -> None:
    sample = Sample(prompt="q", response=text + end, label=label)
    reward = await async_rm(arguments(folder, rm_type=rm_type), sample)
    assert (reward["score"] if isinstance(reward, dict) else reward) == paid
    assert sample.response == text + end, "the sample keeps the text that the function set"


async def test_a_checker_of_the_end_of_a_text_reads_it_without_the_end_token() -> None:
    instructions = {
        "instruction_id_list": ["startend:end_checker"],
        "kwargs": [{"end_phrase": "Bye."}],
    }
    args = arguments("", rm_type="ifbench", hf_checkpoint=None)
    assert (
        await async_rm(
            args, Sample(prompt="q", response="Well. Bye.<|im_end|>", metadata=instructions)
        )
        == 1.0
    )
