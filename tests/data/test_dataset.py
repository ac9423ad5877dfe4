"""Rows → samples: what is understood, and that every row that is not says where it stands."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data.dataset import Dataset
from slime.data.media import load_image, processor_inputs
from slime.data.rows import DataError, split_spec


class ChatTokenizer:
    """The part of a tokenizer that a data set uses, with words as tokens."""

    def apply_chat_template(
        self, messages: Any, tools: Any = None, tokenize: bool = True, **kwargs: Any
    ) -> str:
        assert not tokenize and kwargs.pop("add_generation_prompt")
        head = f"tools={len(tools)} " if tools else ""
        style = "".join(f"{k}={v} " for k, v in kwargs.items())
        return (
            head + style + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        )

    def __call__(
        self, texts: list[str], add_special_tokens: bool = True
    ) -> dict[str, list[list[str]]]:
        assert not add_special_tokens
        return {"input_ids": [text.split() for text in texts]}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def problems_of(path: str, **more: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        Dataset(path, **more)
    return caught.value.problems


def test_text_and_chat_prompts(file: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    path = write(file, [{"prompt": "1+1?", "label": 2}, "", {"prompt": chat, "label": "4"}])
    plain = Dataset(path)
    assert [s.prompt for s in plain.samples] == ["1+1?", chat] and [
        s.label for s in plain.samples
    ] == ["2", "4"]
    rendered = Dataset(
        path, ChatTokenizer(), apply_chat_template=True, apply_chat_template_kwargs={"think": False}
    )
    assert rendered[0].prompt == "think=False <user>1+1?<assistant>"
    assert rendered[1].prompt == "think=False <system>Be brief.<user>2+2?<assistant>"
    assert rendered[1].apply_chat_template_kwargs == {"think": False}


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (True, "True"),
        ("x = 4", "x = 4"),
        (None, None),
        (10**30, "1" + "0" * 30),
    ],
)
def test_scalar_labels_are_text(file: Path, value: Any, label: str | None) -> None:
    assert Dataset(write(file, [{"prompt": "p", "label": value}]))[0].label == label


def test_structured_labels_and_dotted_keys(file: Path) -> None:
    path = write(file, [{"prompt": "p", "reward_model": {"ground_truth": 34, "style": "rule"}}])
    assert Dataset(path, label_key="reward_model.ground_truth")[0].label == "34"
    assert Dataset(path, label_key="reward_model")[0].label == {"ground_truth": 34, "style": "rule"}
    assert Dataset(path)[0].label is None, "the default label column may be absent"


def test_metadata_and_tools_as_objects_or_json_text(file: Path) -> None:
    """trap 15"""
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"prompt": "a", "metadata": {"k": 1}, "tools": tools},
        {"prompt": "b", "metadata": '{"k": 1}', "tools": json.dumps(tools)},
        {"prompt": "c", "metadata": None, "tools": []},
        {"prompt": "d", "metadata": ""},
    ]
    data = Dataset(write(file, rows), ChatTokenizer(), apply_chat_template=True)
    assert data[0].metadata == data[1].metadata == {"k": 1, "tools": tools}
    assert data[2].metadata == data[3].metadata == {}
    assert isinstance(data[1].prompt, str) and data[1].prompt.startswith("tools=1 ")


def test_every_malformed_row_is_named(file: Path) -> None:
    rows = [
        {"prompt": "fine", "label": 1},
        '{"prompt": "cut',
        "",
        {"question": "?", "answer": "!"},
        [1, 2],
        {"prompt": 5},
        {"prompt": [{"content": "no role"}]},
        {"prompt": [{"role": "user", "content": 3}]},
        {"prompt": "p", "metadata": "{"},
        {"prompt": "p", "metadata": "[]"},
        {"prompt": "p", "tools": "x"},
        {"prompt": "p", "label": float("nan")},
        {"prompt": " "},
        {"prompt": [7, 5]},
    ]
    path = write(file, rows)
    expected = [
        (2, "not valid JSON: Unterminated string starting at at column 12"),
        (4, "no prompt column 'prompt'; the row has 'question', 'answer'"),
        (5, "a row must be a JSON object, this is a list (one object a line; a list of objects is"),
        (6, "the prompt 'prompt' must be a text or a list of messages, not int 5"),
        (7, "message 0 of 'prompt' must be an object with a role"),
        (8, "message 0 of 'prompt' has a content that is int 3"),
        (9, "metadata is a text that is not valid JSON"),
        (10, "metadata must be an object"),
        (11, "tools is a text that is not valid JSON"),
        (12, "NaN is not JSON"),
        (13, "the prompt 'prompt' is empty"),
        (14, "give the text of token ids"),
    ]
    found = problems_of(path)
    assert len(found) == len(expected)
    for line, (number, text) in zip(found, expected, strict=True):
        assert line.startswith(f"{path}:{number}: ") and text in line


def test_json_over_several_lines_tells_where_it_belongs(file: Path) -> None:
    problems = problems_of(write(file, [json.dumps([{"prompt": "p"}], indent=2)]))
    assert "one object a line; a list of objects is .json" in problems[0]


def test_at_most_twenty_are_shown(file: Path) -> None:
    found = problems_of(write(file, ["{"] * 33))
    assert len(found) == 21 and "13 more" in found[-1]
    assert found[19].startswith(f"{file}:20: ")


def test_a_wrong_key_is_said_once_with_the_keys_that_are_there(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(file, [{"question": "q", "answer": "a"}] * 50)
    assert problems_of(path) == [
        f"{path}: no row has the prompt column 'prompt'; the rows have 'question', 'answer': name it "
        "with --input-key"
    ]
    found = problems_of(path, prompt_key="question", label_key="anwser")
    assert found == [
        f"{path}: no row has the label column 'anwser'; the rows have 'question', 'answer': name it "
        "with --label-key"
    ]
    with caplog.at_level("WARNING"):
        assert len(Dataset(path, prompt_key="question", metadata_key="info")) == 50
    assert "column 'info'" in caplog.text and "'question', 'answer'" in caplog.text
    path = write(file, [{"prompt": "q", "gold": 1}, {"prompt": "q"}])
    (problem,) = problems_of(path, label_key="gold")
    assert problem.startswith(f"{path}:2: ") and "column 'gold'" in problem


def test_unusable_files(tmp_path: Path) -> None:
    assert "does not exist" in problems_of(str(tmp_path / "absent.jsonl"))[0]
    assert "is openai/gsm8k:CONFIGURATION:SPLIT" in problems_of("openai/gsm8k")[0]
    assert "hf download" not in problems_of("absent/rows.jsonl")[0]
    assert "is a folder" in problems_of(str(tmp_path))[0]
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert "'.csv'" in problems_of(str(tmp_path / "rows.csv"))[0]
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    assert "Parquet" in problems_of(str(tmp_path / "rows.parquet"))[0]
    assert problems_of(write(tmp_path / "empty.jsonl", [""])) == [
        f"{tmp_path}/empty.jsonl: no rows"
    ]
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    assert "byte 12" in problems_of(str(tmp_path / "latin.jsonl"))[0]


bounds = st.none() | st.integers(-12, 12)


@given(bounds, bounds)
def test_slices_are_those_of_python(start: int | None, stop: int | None) -> None:
    def text(bound: int | None) -> str:
        return "" if bound is None else str(bound)

    path, selected = split_spec(f"a@b/rows.jsonl@[{text(start)}:{text(stop)}]")
    assert path == Path("a@b/rows.jsonl") and selected == slice(start, stop)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [("[1:3]", [1, 2]), ("[-2:]", [8, 9]), ("[:-8]", [0, 1]), ("[8:99]", [8, 9])],
)
def test_slices_select_rows(tmp_path: Path, suffix: str, spec: str, expected: list[int]) -> None:
    rows = [{"prompt": f"p{i}", "label": i} for i in range(10)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))  # blank lines are no rows
    else:
        write_parquet(path, rows)
    assert [s.label for s in Dataset(f"{path}@{spec}").samples] == list(map(str, expected))


def test_bad_slices(file: Path) -> None:
    path = write(file, [{"prompt": "p"}])
    for spec in ("[1]", "[a:b]", "[-:]", "[1:2:3]"):
        assert "path@[start:stop]" in problems_of(f"{path}@{spec}")[0]
    assert problems_of(f"{path}@[5:]") == [f"{path}@[5:]: no rows"]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_fields_of_other_tools_that_parquet_fills_in_are_left_out(tmp_path: Path) -> None:
    def schema(name: str, **properties: Any) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": properties}},
        }

    def turns(name: str, **arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]

    tools = [
        schema("weather", city={"type": "string"}),
        schema("add", n={"type": "integer", "enum": [1, 2]}),
    ]
    rows = [
        {"prompt": turns("weather", city="Paris"), "tools": tools},
        {"prompt": turns("add", n=1), "tools": tools},
    ]
    write_parquet(tmp_path / "rows.parquet", rows)
    samples = Dataset(str(tmp_path / "rows.parquet")).samples
    assert [sample.prompt for sample in samples] == [row["prompt"] for row in rows]
    assert [sample.metadata["tools"] for sample in samples] == [tools, tools]
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": turns("add", n=None)}]))
    assert Dataset(str(tmp_path / "rows.json")).samples[0].prompt == turns("add", n=None)


def test_parquet_rows(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    rows = [
        {"prompt": [{"role": "user", "content": "a"}, call], "label": 1.5, "metadata": {"x": 1}},
        {"prompt": [{"role": "user", "content": "b"}], "label": None, "metadata": None},
    ]
    path = tmp_path / "rows.parquet"
    write_parquet(path, rows)
    data = Dataset(str(path))
    assert data[0].prompt == [{"role": "user", "content": "a"}, call], (
        "fields that a message does not have are gone"
    )
    assert [s.label for s in data.samples] == ["1.5", None]
    assert [s.metadata for s in data.samples] == [{"x": 1}, {}]
    write_parquet(path, [{"prompt": "a"}, {"prompt": None}])
    (problem,) = problems_of(str(path))
    assert (
        problem.startswith(f"{path}, row 2: ") and "'prompt'" in problem and "NoneType" in problem
    )


def test_parts_have_no_fields_of_other_parts(tmp_path: Path) -> None:
    """Templates that ask whether a part has an image would take a text for one, and leave the text
    out.
    """
    path = tmp_path / "rows.parquet"
    picture, text = {"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}
    write_parquet(
        path,
        [{"prompt": [{"role": "user", "content": parts}]} for parts in ([picture, text], [text])],
    )
    first, second = Dataset(str(path)).samples
    assert first.prompt == [{"role": "user", "content": [picture, text]}]
    assert (
        second.prompt == [{"role": "user", "content": [text]}] and second.multimodal_inputs is None
    )
    template = (Path(__file__).parent / "templates" / "qwen3_5.jinja").read_text()
    from transformers.utils.chat_template_utils import render_jinja_template

    (said,), _ = render_jinja_template(
        [second.prompt], chat_template=template, add_generation_prompt=True
    )
    assert "What is it?" in said and "image_pad" not in said


def test_media_stand_where_their_placeholders_were(file: Path) -> None:
    part = {"type": "image", "image": "c.png", "max_pixels": 9}
    row = {"prompt": "<image>Same as <image>? <video>", "images": ["a.png", part], "clip": "v.mp4"}
    keys = {"image": "images", "video": "clip"}
    sample = Dataset(write(file, [row]), multimodal_keys=keys)[0]
    assert sample.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "Same as "},
                part,
                {"type": "text", "text": "? "},
                {"type": "video", "video": "v.mp4"},
            ],
        }
    ]
    assert sample.multimodal_inputs == {"images": ["a.png", "c.png"], "videos": ["v.mp4"]}
    text_only = Dataset(write(file, [{"prompt": "no media"}, row]), multimodal_keys=keys)[0]
    assert (
        text_only.prompt == [{"role": "user", "content": "no media"}]
        and text_only.multimodal_inputs is None
    )


def test_parts_without_their_image_get_the_next_one(file: Path, tmp_path: Path) -> None:
    """The form of TRL and of chat templates: parts stand for the images, which are in a column of
    their own.
    """
    parts = [
        {"type": "image"},
        {"type": "text", "text": "or <image>?"},
        {"type": "image", "image": "own.png"},
    ]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    row = {"prompt": [{"role": "user", "content": parts}, call], "images": ["a.png", "b.png"]}
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([row])
    parquet.write_table(table, tmp_path / "rows.parquet")
    for path in (write(file, [row]), str(tmp_path / "rows.parquet")):
        sample = Dataset(path, multimodal_keys={"image": "images"})[0]
        assert sample is not None and sample.multimodal_inputs == {
            "images": ["a.png", "b.png", "own.png"]
        }
        assert sample.prompt[0]["content"][1:4] == [  # type: ignore[index]
            {"type": "text", "text": "or "}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "?"},
        ]  # fmt: skip
        assert sample.prompt[1] == call


def test_images_in_the_form_of_openai_are_media(file: Path) -> None:
    """The templates of Qwen write a placeholder for such a part. Without its image, the model sees
    nothing there.
    """
    parts = [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        {"type": "image_url", "image_url": "b.png"},
        {"type": "image", "image": "c.png"},
        {"type": "text", "text": "What is it?"},
    ]
    (sample,) = Dataset(write(file, [{"prompt": [{"role": "user", "content": parts}]}])).samples
    assert sample.multimodal_inputs == {"images": ["https://example.org/a.png", "b.png", "c.png"]}


@pytest.mark.parametrize(("prompt", "count"), [("<image><image>", 2), ("none", 0)])
def test_placeholders_and_items_must_agree(file: Path, prompt: str, count: int) -> None:
    path = write(file, [{"prompt": prompt, "images": ["a.png"]}])
    expected = f"{path}:1: {count} placeholders <image> in the prompt, but 1 items in 'images'"
    assert problems_of(path, multimodal_keys={"image": "images"}) == [expected]


def test_images_from_everywhere(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGBA", (3, 2), "red")
    stream = io.BytesIO()
    image.save(stream, "PNG")
    content = stream.getvalue()
    (tmp_path / "red.png").write_bytes(content)
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    path = str(tmp_path / "red.png")
    for item in (
        image,
        content,
        uri,
        path,
        f"file://{path}",
        {"bytes": content, "path": None},
        {"path": path},
    ):
        loaded = load_image(item)
        assert (
            loaded.size == (3, 2)
            and loaded.mode == "RGB"
            and loaded.getpixel((0, 0)) == (255, 0, 0)
        )
    assert processor_inputs({"images": [path], "videos": ["v"]})["videos"] == ["v"]
    with pytest.raises(FileNotFoundError, match=r"absent\.png"):
        load_image("absent.png")
    with pytest.raises(FileNotFoundError, match=r"no-such-user/absent\.png"):
        load_image("~no-such-user/absent.png")
    with pytest.raises(TypeError, match="an object with bytes or path"):
        load_image({"url": "x"})


def test_long_prompts_are_left_out_in_order(file: Path) -> None:
    prompts = ["a", "a b c", "b", "a b", "c", "a b c d"]
    chat = [{"role": "user", "content": "x x x x x x"}]
    path = write(file, [{"prompt": p} for p in [*prompts, chat]])
    assert [s.prompt for s in Dataset(path, ChatTokenizer(), None, 2).samples] == [
        "a",
        "b",
        "a b",
        "c",
        chat,
    ]
    told = r"all 6 prompts are longer than --rollout-max-prompt-len 0 \(of an evaluation set: --eval-max-prompt-len"
    with pytest.raises(DataError, match=told):
        Dataset(write(file, [{"prompt": p} for p in prompts]), ChatTokenizer(), None, 0)


def test_the_order_of_an_epoch_depends_on_nothing_else(file: Path) -> None:
    path = write(file, [{"prompt": str(i)} for i in range(50)])
    one, other = Dataset(path, seed=1), Dataset(path, seed=1)
    one.shuffle(0)
    one.shuffle(3)
    other.shuffle(3)
    assert [s.prompt for s in one.samples] == [s.prompt for s in other.samples]
    assert sorted(int(str(s.prompt)) for s in one.samples) == list(range(50))
    other.shuffle(4)
    assert [s.prompt for s in one.samples] != [s.prompt for s in other.samples]
    different = Dataset(path, seed=2)
    different.shuffle(3)
    assert [s.prompt for s in one.samples] != [s.prompt for s in different.samples]


def test_a_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(
        '[{"prompt": "a", "label": 1}, {"prompt": "b", "label": 2}, {"prompt": "c", "label": 3}]'
    )
    for streaming in (False, True):
        data = Dataset(f"{path}@[1:]", streaming=streaming)
        assert [data[i].label for i in range(len(data))] == ["2", "3"]  # type: ignore[union-attr]
    path.write_text('[{"prompt": "a"}, 3]')
    (problem,) = problems_of(str(path))
    assert problem.startswith(f"{path}, row 2: ")
    path.write_text('{"prompt": "a"}')
    assert problems_of(str(path)) == [
        f"{path}: a .json file must be a list of objects, this is a dict"
    ]
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert ".jsonl)" in problems_of(str(path))[0]


@pytest.mark.parametrize(
    ("name", "prompt", "label", "rows"),
    [
        ("gsm8k/train.jsonl", "question", "answer", 7473),
        ("gsm8k/test.jsonl", "question", "answer", 1319),
        ("dapo/dapo_math_17k.parquet", "prompt", "reward_model.ground_truth", 17917),
        ("aime/aime24.jsonl", "problem", "answer", 30),
        ("aime/AIME25_retool.jsonl", "input", "output", 30),
        ("math500/math500.jsonl", "problem", "answer", 500),
        ("hotpotqa/hotpot_dev_v1_simplified.json", "question", "answer", 7405),
    ],
)
def test_the_shared_data_sets(
    datasets_dir: Path, name: str, prompt: str, label: str, rows: int
) -> None:
    path = f"{datasets_dir}/{name}"
    held = Dataset(path, prompt_key=prompt, label_key=label)
    assert len(held) == rows and all(sample.label for sample in held.samples)
    streamed = Dataset(path, prompt_key=prompt, label_key=label, streaming=True)
    for data in (held, streamed):
        data.shuffle(1)
    assert [streamed[i].prompt for i in range(300) if i < rows] == [
        s.prompt for s in held.samples[:300]
    ]  # type: ignore[union-attr]


def test_a_real_template(smollm2: Path, file: Path) -> None:
    from slime.utils.processing_utils import load_tokenizer

    data = Dataset(
        write(file, [{"prompt": "hi"}]), load_tokenizer(smollm2), None, 64, apply_chat_template=True
    )
    assert str(data[0].prompt).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_folder_of_data_files_is_named_with_the_way_to_read_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"train-00000-of-00002.{kind}").write_text("")
    with pytest.raises(DataError, match=f"{tmp_path}:default:train"):
        Dataset(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"is a folder, not a file \(looked for [^)]*\)$"):
        Dataset(str(tmp_path / "empty"))
