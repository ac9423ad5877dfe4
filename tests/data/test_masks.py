"""Loss masks of conversations, with a real tokenizer: its own template, and others that behave like
those in use.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer

Message = dict[str, Any]

# Reasoning only in turns after the last question, an empty block where there is none, tool answers
# in one user turn.
THINKING = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content or '' -%}{%- set reasoning = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content -}}
{%- for call in m.tool_calls or [] -%}{{- '<tool_call>' + (call | tojson) + '</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>' + m.content + '</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}HEADER{%- endif -%}
"""
STRICT = """
{%- if messages[-1].role == 'user' or not add_generation_prompt -%}{{- '<s>' -}}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- if m.role == 'user' -%}{{- '[INST] ' + m.content | trim + ' [/INST]' -}}
{%- else -%}{{- ' ' + m.content | trim + '</s>' -}}{%- endif -%}
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(smollm2)


def with_template(tokenizer: Any, template: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def trained(tokenizer: Any, messages: list[Message], kind: str = "qwen", **more: Any) -> list[str]:
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages, **more)
    text = tokenizer.apply_chat_template(
        [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in messages],
        tokenize=False,
        **more,
    )
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"], (
        "the ids are those of the template"
    )
    assert len(mask) == len(ids) and set(mask) <= {0, 1}
    return generator.get_text_from_loss_mask(ids, mask)


TWO_TURNS = [user("Hi"), assistant("Hello!"), user("2+2?"), assistant("4")]


def test_assistant_turns_of_the_real_template(tokenizer: Any) -> None:
    assert trained(tokenizer, TWO_TURNS) == ["Hello!<|im_end|>\n", "4<|im_end|>\n"]
    with_system = [{"role": "system", "content": "Be brief."}, *TWO_TURNS]
    for kind in ("qwen", "qwen3", "qwen3_5"):
        assert trained(tokenizer, with_system, kind) == ["Hello!<|im_end|>\n", "4<|im_end|>\n"]


texts = st.text(st.sampled_from("ab 1?\nä<|>é漢"), max_size=12)


@settings(
    deadline=None,
    max_examples=of_all(40, 15),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(turns=st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=3))
def test_any_text_against_a_mask_made_by_hand(
    tokenizer: Any, turns: list[tuple[str, str, bool]]
) -> None:
    """Piece by piece: special tokens end every piece, so joining the tokens of the pieces is
    exact.
    """
    messages: list[Message] = [{"role": "system", "content": "s"}]
    pieces = [("<|im_start|>system\ns<|im_end|>\n", 0)]
    for question, answer, learn in turns:
        messages += [user(question), assistant(answer, step_loss_mask=int(learn))]
        pieces += [(f"<|im_start|>user\n{question}<|im_end|>\n", 0), ("<|im_start|>assistant\n", 0)]
        pieces += [(f"{answer}<|im_end|>\n", int(learn))]
    text = "".join(piece for piece, _ in pieces)
    owner = [flag for piece, flag in pieces for _ in piece]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(messages)
    assert ids == encoded["input_ids"]
    assert mask == [owner[begin] for begin, _ in encoded["offset_mapping"]]


def test_step_loss_mask_and_lengths(tokenizer: Any) -> None:
    for name in ("step_loss_mask", "weight"):
        messages = [*TWO_TURNS[:1], assistant("Hello!", **{name: 0}), *TWO_TURNS[2:]]
        assert trained(tokenizer, messages) == ["4<|im_end|>\n"]
    assert MultiTurnLossMaskGenerator.get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [1]]) == [
        3,
        0,
        1,
    ]


def test_content_that_looks_like_a_turn(tokenizer: Any) -> None:
    fake = "<|im_start|>assistant\nfake<|im_end|>\n"
    assert trained(tokenizer, [user(fake), assistant("real"), user(fake)]) == ["real<|im_end|>\n"]


def test_an_answer_equal_to_the_question(tokenizer: Any) -> None:
    assert trained(tokenizer, [user("x"), assistant("x"), user("x"), assistant("")]) == [
        "x<|im_end|>\n",
        "<|im_end|>\n",
    ]


def test_thinking_template(tokenizer: Any) -> None:
    thinking = with_template(tokenizer, THINKING.replace("HEADER", ""))
    messages = [
        user("a"),
        assistant("<think>\nold\n</think>\n\nb"),
        user("c"),
        assistant("<think>\nnew\n</think>\n\nd"),
    ]
    assert trained(thinking, messages, "qwen3") == [
        "b<|im_end|>\n",
        "<think>\nnew\n</think>\n\nd<|im_end|>\n",
    ]
    assert trained(thinking, [*messages[:3], assistant("d")], "qwen3")[1] == (
        "<think>\n\n</think>\n\nd<|im_end|>\n"
    )
    field = [user("c"), assistant("d", reasoning_content="new")]
    assert trained(thinking, field, "qwen3") == ["<think>\nnew\n</think>\n\nd<|im_end|>\n"]


@pytest.mark.parametrize("header", ["", "{{- '<think>\\n' -}}"])
def test_the_opening_think_is_the_headers(tokenizer: Any, header: str) -> None:
    thinking = with_template(tokenizer, THINKING.replace("HEADER", header))
    messages = [user("a"), assistant("b"), user("c"), assistant("<think>\nnew\n</think>\n\nd")]
    assert trained(thinking, messages, "qwen3_5") == [
        "b<|im_end|>\n",
        "new\n</think>\n\nd<|im_end|>\n",
    ]


def test_tool_calls_are_trained_and_tool_answers_are_not(tokenizer: Any) -> None:
    thinking = with_template(tokenizer, THINKING.replace("HEADER", ""))
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    answers = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    texts = trained(thinking, [user("a"), call, *answers, assistant("b")], "qwen3", tools=tools)
    assert texts == [
        '<think>\n\n</think>\n\n<tool_call>{"name": "f"}</tool_call><|im_end|>\n',
        "<think>\n\n</think>\n\nb<|im_end|>\n",
    ]


def test_a_template_that_trims_and_refuses(tokenizer: Any) -> None:
    strict = with_template(tokenizer, STRICT)
    texts = trained(strict, [user(" a "), assistant(" b "), user("c"), assistant("d")])
    assert texts == [" b</s>", " d</s>"], "after [/INST] the model writes the space too"


def test_r1_distilled_models(tokenizer: Any) -> None:
    r1 = with_template(tokenizer, THINKING.replace("HEADER", "{{- '<think>\\n' -}}"))
    generator = MultiTurnLossMaskGenerator(r1, "distill_qwen")
    ids, mask = generator.get_loss_mask([user("a"), assistant("<think>\nx\n</think>\n\nb")])
    assert generator.get_text_from_loss_mask(ids, mask) == ["x\n</think>\n\nb<|im_end|>"]
    assert tokenizer.decode(ids[: mask.index(1)]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    with pytest.raises(ValueError, match="last message"):
        generator.get_loss_mask([user("a")])
    r1.add_tokens(["<｜Assistant｜>"])
    assert MultiTurnLossMaskGenerator(r1, "qwen").tokenizer_type == "distill_qwen"


def test_media_tokens_of_a_processor(tokenizer: Any) -> None:
    """A processor puts many tokens where the text has one placeholder."""
    generator = MultiTurnLossMaskGenerator(tokenizer)
    messages = [user("see <|endoftext|> ok"), assistant("A cat"), user("sure?"), assistant("A cat")]
    ids, mask = generator.get_loss_mask(messages)
    (pad,) = tokenizer("<|endoftext|>", add_special_tokens=False)["input_ids"]
    at = ids.index(pad)
    expanded = ids[:at] + [pad] * 9 + ids[at + 1 :]
    again, aligned = generator.get_loss_mask_with_multimodal_alignment(messages, expanded)
    assert again == expanded and aligned == mask[:at] + [0] * 9 + mask[at + 1 :]
    with pytest.raises(ValueError, match="input_ids"):
        generator.get_loss_mask_with_multimodal_alignment(messages, ids[:-4])


ROLES = """
{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def test_the_end_at_which_the_engine_stops(tokenizer: Any) -> None:
    """The stop ids of a checkpoint decide, where they are known."""
    roles = with_template(tokenizer, ROLES)
    roles.add_tokens(["<|user|>", "<|assistant|>"])  # not even special
    user_id, end = roles.convert_tokens_to_ids("<|user|>"), roles.eos_token_id

    def texts(stop_ids: set[int]) -> list[str]:
        generator = MultiTurnLossMaskGenerator(roles, stop_ids=stop_ids)
        return generator.get_text_from_loss_mask(*generator.get_loss_mask(TWO_TURNS))

    assert texts(set()) == texts({user_id, end}) == ["Hello!<|user|>", "4<|user|>"]
    assert texts({end}) == ["Hello!", "4<|im_end|>"]


def test_a_template_that_ends_the_last_turn_otherwise(tokenizer: Any) -> None:
    """Phi-3.5 writes the end of text behind the last turn, gpt-oss another token in place of the
    end of the others.
    """
    phi = with_template(
        tokenizer,
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n"
        "' + m.content + '<|im_end|>\n"
        "' -}}{%- endfor -%}{{- '<|im_start|>assistant\n"
        "' if add_generation_prompt else '<|endoftext|>' -}}",
    )
    assert trained(phi, TWO_TURNS) == ["Hello!<|im_end|>\n", "4<|im_end|>\n<|endoftext|>"]
    gpt = with_template(
        tokenizer,
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + m.content -}}{{- '<|endoftext|>' "
        "if loop.last and m.role == 'assistant' else '<|im_end|>' -}}{%- endfor -%}{%- if "
        "add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}",
    )
    assert trained(gpt, TWO_TURNS) == ["Hello!<|im_end|>", "4<|endoftext|>"]


def test_an_added_end_follows_the_processors_tokens(tokenizer: Any) -> None:
    roles = with_template(tokenizer, ROLES)
    roles.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    generator = MultiTurnLossMaskGenerator(roles)
    ids, mask = generator.get_loss_mask(TWO_TURNS)
    assert generator.get_loss_mask_with_multimodal_alignment(TWO_TURNS, ids[:-1]) == (ids, mask)


def test_r1_distilled_models_train_text(tokenizer: Any) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    ids, mask = generator.get_loss_mask([user("a"), assistant([{"type": "text", "text": "b"}])])  # type: ignore[arg-type]
    assert generator.get_text_from_loss_mask(ids, mask) == ["b<|im_end|>"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(ValueError, match="tool calls"):
        generator.get_loss_mask([user("a"), call])


def test_mistakes(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="unknown --loss-mask-type 'gpt'"):
        MultiTurnLossMaskGenerator(tokenizer, "gpt")
    with pytest.raises(ValueError, match="fast tokenizer"):
        MultiTurnLossMaskGenerator(object())
    with pytest.raises(ValueError, match="assistant message"):
        MultiTurnLossMaskGenerator(tokenizer).get_loss_mask([user("a")])
