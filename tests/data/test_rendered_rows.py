"""Rows are rendered and masked before a run starts; what is refused is named by file and row."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.config.args import Args
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION, SFT_FUNCTION
from slime.data.dataset import Dataset, PromptMaker
from slime.data.masks import MultiTurnLossMaskGenerator
from slime.data.prompts import RowKeys
from slime.data.rows import DataError
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource, load_dataset
from slime.data.tokenizers import load_tokenizer, render_chat, render_prompt
from slime.data.validate import check_data
from slime.rollout.rm_hub import check_label
from slime.rollout.sft_rollout import generate_rollout

GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
JOINS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n"
    "' + m.content + '<|im_end|>\n"
    "' }}{% endfor %}" + GENERATION
)
PRINTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor "
    "%}<|im_end|>\n"
    "{% endfor %}" + GENERATION
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}" + GENERATION
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content | upper + '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant', 'observation'] %}{{ "
    "'<|im_start|>' + m.role + '\n"
    "' + m.content + '<|im_end|>\n"
    "' }}{% endif %}{% endfor %}" + GENERATION
)


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: object, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


PIECES = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
CALL = answer(
    None, tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
)
RESULT = {"role": "tool", "content": "1"}


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that gives a folder with SmolLM2's tokenizer and a template, the same one
    for the same ``settings`` of the model, because slime keeps what it has read of a folder."""

    @functools.cache
    def make(template: str, **settings: tuple[int, ...]) -> str:
        folder = tmp_path_factory.mktemp("model")
        for file in smollm2.glob("*.json"):
            shutil.copyfile(file, folder / file.name)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        for name in ("generation_config.json", "config.json") if settings else ():
            (folder / name).write_text(
                json.dumps(json.loads((folder / name).read_text()) | settings)
            )
        return str(folder)

    return make


def arguments(model: str, file: str, **more: Any) -> Args:
    common = {
        "input_key": "prompt",
        "label_key": "label",
        "rm_type": "math",
        "apply_chat_template": True,
    }
    common["eval_function_path"] = DEFAULT_ROLLOUT_FUNCTION
    return Args(**{**common, "hf_checkpoint": model, "prompt_data": file, **more})


def write(path: Path, prompts: list[Any]) -> str:
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "label": "4"}) + "\n" for prompt in prompts)
    )
    return str(path)


REFUSED = {
    "roles": (ALTERNATES, [answer("Welcome"), user("q")], "roles must alternate"),
    "unknown role": (PRINTS, [{"role": "human", "content": "q"}], "message 0 has the role 'human'"),
    "left out": (
        KNOWN_ROLES,
        [user("q"), answer("a"), RESULT],
        "leaves out message 2 (role 'tool')",
    ),
    "lost call": (JOINS, [user("q"), CALL, RESULT], "leaves out the tool calls of message 1"),
    "lost call of a name in the text": (
        JOINS,
        [user("please add"), CALL, RESULT],
        "leaves out the tool calls of message 1",
    ),
    "ends with a call": (
        PRINTS,
        [user("q"), CALL],
        "ends with an assistant's message that has no words",
    ),
    "ends with nothing": (
        PRINTS,
        [user("q"), answer(" ")],
        "ends with an assistant's message that has no words",
    ),
    "ends otherwise": (
        ALTERNATES,
        [user("q"), answer("The answer")],
        "would continue, but the chat template refuses",
    ),
    "no processor": (
        PRINTS,
        [user([{"type": "image", "image": "data:,x"}, *PIECES])],
        "has no processor for media",
    ),
    "no content": (
        PRINTS,
        [{"role": "user"}],
        "message 0 of 'prompt' has a content that is NoneType None",
    ),
    "no role": (PRINTS, [{"content": "q"}], "message 0 of 'prompt' must be an object with a role"),
    "no messages": (PRINTS, [], "must be a text or a list of messages, not list []"),
}


@pytest.mark.parametrize("kind", ["training", "evaluation", "later", "streamed"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rendered_is_named_by_file_and_row(
    model: Any, tmp_path: Path, name: str, kind: str
) -> None:
    template, prompt, words = REFUSED[name]
    file = write(tmp_path / "rows.jsonl", [[user("2+2?")], prompt, "2+2?"])
    good = write(tmp_path / "good.jsonl", [[user("2+2?")]])
    args = arguments(model(template), good if kind == "evaluation" else file)
    if kind == "evaluation":
        args = args.with_values(eval_prompt_data=["held-out", file])
    if kind == "later":  # messages stay messages until a prompt is generated from
        args = args.with_values(apply_chat_template=False)
    (problem,) = check_data(args, check_label)
    assert words in problem and "\n" not in problem
    assert problem.removeprefix("evaluation set held-out: ").startswith(f"{file}:2: ")
    if kind == "streamed":
        with pytest.raises(DataError) as caught:
            load_dataset(args.with_values(streaming_data=True))
        assert caught.value.problems == [problem]


def test_a_variable_that_the_template_does_not_have_is_told(model: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [[user("2+2?")]])
    args = arguments(model(PRINTS), file, apply_chat_template_kwargs={"thinking": False})
    assert check_data(args, check_label) == []
    assert "--apply-chat-template-kwargs: the template has no 'thinking'" in args.notices
    args = arguments(model(PRINTS), file, apply_chat_template_kwargs={"messages": []})
    assert not any("template" in notice for notice in args.notices)


def test_a_checkpoint_without_a_tokenizer_or_a_template_is_told_once(
    model: Any, smollm2: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", [[user("2+2?")], "3+3?"])
    config = smollm2 / "config.json"
    for name in ("weights", "base"):
        (tmp_path / name).mkdir()
        shutil.copyfile(config, tmp_path / name / "config.json")
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(smollm2 / part, tmp_path / "base" / part)
    (problem,) = check_data(arguments(str(tmp_path / "weights"), file), check_label)
    assert problem.startswith(f"--hf-checkpoint: {tmp_path / 'weights'} holds no tokenizer")
    (problem,) = check_data(arguments(str(tmp_path / "base"), file), check_label)
    assert "has no chat template" in problem and "--apply-chat-template" in problem


def test_tools_that_no_prompt_would_show(model: Any, tmp_path: Path) -> None:
    """A template without tools ignores them; a prompt may name them itself."""
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    rows = [{"prompt": [user(text)], "label": "4", "tools": [add]} for text in ("q", "Use add.")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = check_data(arguments(model(PRINTS), str(file)), check_label)
    assert problem.startswith(f"{file}:1: ") and "tools" in problem
    shows = "{{ tools | tojson }}" + PRINTS
    assert check_data(arguments(model(shows), str(file)), check_label) == []


def test_what_the_processor_refuses_is_named(model: Any, tmp_path: Path) -> None:
    """A processor of a package that is not installed here stands in: it takes square images
    only.
    """
    from PIL import Image

    class Square:
        chat_template = PRINTS

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return str(load_tokenizer(model(PRINTS)).apply_chat_template(messages, **options))

        def __call__(self, text: list[str], images: list[Any]) -> dict[str, Any]:
            if images[0].width != images[0].height:
                raise AssertionError(f"aspect ratio of {images[0].size}\nis not 1")
            return {"input_ids": [[1]]}

    make = PromptMaker(
        RowKeys(), load_tokenizer(model(PRINTS)), Square, rendered_later=True, checks=True
    )  # type: ignore[arg-type]
    sizes = {"good": (4, 4), "bad": (4, 8)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows = [
        [user([{"type": "image", "image": str(tmp_path / f"{name}.png")}])]
        for name in (*sizes, "broken")
    ]
    with pytest.raises(DataError) as caught:
        Dataset(write(tmp_path / "rows.jsonl", rows), make=make)
    bad, broken = caught.value.problems
    assert "rows.jsonl:2: " in bad and bad.endswith(": AssertionError: aspect ratio of (4, 8)")
    assert "rows.jsonl:3: " in broken and "UnidentifiedImageError" in broken
    make.mask_type, conversation = "qwen", [*rows[0], answer("It is white.")]
    with pytest.raises(DataError, match=r"sft.jsonl:1.*input_ids"):
        Dataset(write(tmp_path / "sft.jsonl", [conversation]), make=make)


def test_a_user_s_functions_may_use_messages_in_another_way(model: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [[{"role": "human", "content": "q"}], [user("q"), CALL]])
    args = arguments(
        model(PRINTS),
        file,
        apply_chat_template=False,
        custom_generate_function_path="mine.generate",
    )
    assert check_data(args, check_label) == []


@pytest.mark.parametrize("streamed", [False, True])
def test_the_dry_run_of_the_api_raises_what_the_start_would_say(
    smollm2: Path, tmp_path: Path, streamed: bool
) -> None:
    """With streaming, the dry run may meet rows that the check before the start does not read."""
    good, bad = [[user("q")]], [[{"role": "human", "content": "q"}]]
    file = write(
        tmp_path / "rows.jsonl", [*good * 10_000, *bad * 1000] if streamed else [*good, *bad]
    )
    flags = dict(
        num_rollout=1, rollout_batch_size=1, streaming_data=streamed, rollout_shuffle=streamed
    )
    with pytest.raises(slime.ConfigError, match=r"rows.jsonl:\d+: message 0.*'human'"):
        slime.dry_run(smollm2, file, apply_chat_template=True, **flags)


SFT = {
    "rollout_function_path": SFT_FUNCTION,
    "loss_type": "sft_loss",
    "apply_chat_template": False,
    "rm_type": None,
}


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (ALTERNATES, [answer("Welcome"), user("q"), answer("a")], "alternate"),
        (PRINTS.replace("{{ m.content }}", ""), [user("q"), answer("a")], "content of message 1"),
        (JOINS, [user("q"), CALL, RESULT, answer("a")], "calls of message 1"),
        (PRINTS, [user("q")], "assistant message"),
    ],
)
def test_a_conversation_without_a_mask_is_named(
    model: Any, tmp_path: Path, template: str, messages: list[Any], words: str
) -> None:
    file = write(tmp_path / "rows.jsonl", [messages] * 2)
    args = arguments(model(template), file, **SFT)
    problems = check_data(args, check_label)
    assert [problem.partition(": ")[0] for problem in problems] == [f"{file}:1", f"{file}:2"]
    assert all(words in problem for problem in problems)
    with pytest.raises(DataError, match=r"rows.jsonl:1: "):
        load_dataset(args.with_values(streaming_data=True))


def test_fine_tuning_reads_conversations_in_every_form(model: Any, tmp_path: Path) -> None:
    messages = [
        answer("Welcome"),
        user(PIECES),
        CALL,
        RESULT,
        answer([{"type": "text", "text": "It is 4."}]),
    ]
    file = write(tmp_path / "rows.jsonl", [messages, json.dumps(messages)])
    args = arguments(
        model(PRINTS),
        file,
        **SFT,
        rollout_batch_size=2,
        n_samples_per_prompt=1,
        rollout_global_dataset=True,
    )
    assert check_data(args, check_label) == []
    assert args.notices == [f"{file}: 1 prompts are JSON text, which is read as messages"]

    class Source:
        def get_samples(self, count: int) -> list[Any]:
            dataset = load_dataset(args.with_values(streaming_data=True))
            return [[dataset[i]] for i in range(count)]

    first, second = (group[0] for group in generate_rollout(args, 0, Source()).samples)  # type: ignore[arg-type]
    assert first.tokens == second.tokens and "{'type'" not in str(first.response)
    texts = load_tokenizer(args.hf_checkpoint).decode(first.tokens)
    assert "user\nWhat is 2+2?<|im_end|>" in texts and "None" not in texts
    assert str(first.response).endswith("It is 4.<|im_end|>\n")


@pytest.mark.parametrize(
    ("stops", "trained"),
    [((2,), ["one", "two<|im_end|>"]), ((1, 2), ["one<|im_start|>", "two<|im_start|>"])],
)
def test_fine_tuning_trains_the_end_at_which_the_engine_stops(
    model: Any, tmp_path: Path, stops: tuple[int, ...], trained: list[str]
) -> None:
    asks = "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}{% endfor %}" + asks
    )
    folder = model(template, eos_token_id=stops)
    file = write(tmp_path / "rows.jsonl", [[user("q"), answer("one"), user("r"), answer("two")]])
    args = arguments(
        folder,
        file,
        **SFT,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        rollout_global_dataset=True,
    )
    ((sample,),) = generate_rollout(args, 0, RolloutDataSource(args)).samples
    assert isinstance(sample, Sample) and sample.loss_mask is not None
    tokens = list(sample.tokens[-sample.response_length :])
    masks = MultiTurnLossMaskGenerator(load_tokenizer(folder))
    assert masks.get_text_from_loss_mask(tokens, list(sample.loss_mask)) == trained


@pytest.mark.parametrize("template", [JOINS, PRINTS, PARTS])
def test_texts_are_written_in_the_way_of_the_template(model: Any, template: str) -> None:
    tokenizer = load_tokenizer(model(template))
    for content in ("What is 2+2?", PIECES):
        text = render_prompt(tokenizer, [user(content)])
        assert text == "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_call_without_words(model: Any) -> None:
    for template in (PRINTS, PRINTS.replace("{{ m.content }}", "{{ m.content + '' }}")):
        text = render_chat(load_tokenizer(model(template)), [user("q"), CALL, RESULT])
        assert '<|im_start|>assistant\n{"name": "add", "arguments": {"x": 1}}<|im_end|>' in text


@pytest.mark.parametrize("template", [PRINTS, PARTS])
def test_the_model_continues_an_assistants_words(model: Any, tmp_path: Path, template: str) -> None:
    file = write(tmp_path / "rows.jsonl", [[user("2+2?"), answer("The answer is ")]])
    args = arguments(model(template), file)
    assert check_data(args, check_label) == []
    sample = load_dataset(args)[0]
    assert sample is not None
    assert sample.prompt == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nThe answer is "
    )


def test_json_text_of_messages_is_read_as_messages(model: Any, tmp_path: Path) -> None:
    texts = [json.dumps([user("2+2?")]), "[1, 2] what is next?", '[{"a": 1}] is what?']
    args = arguments(model(JOINS), write(tmp_path / "rows.jsonl", texts))
    assert check_data(args, check_label) == []
    assert args.notices == [
        f"{args.prompt_data}: 1 prompts are JSON text, which is read as messages"
    ]
    dataset = load_dataset(args)
    asked = [
        str(dataset[i].prompt).removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
        for i in range(3)
    ]  # type: ignore[union-attr]
    assert asked == ["2+2?", *texts[1:]]
    (problem,) = check_data(
        arguments(args.hf_checkpoint, write(tmp_path / "bad.jsonl", ['[{"role": "user"}]'])),
        check_label,
    )
    assert "bad.jsonl:1: message 0 of 'prompt'" in problem
