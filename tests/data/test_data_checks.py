"""Checks before a start: files, rows, keys and labels, of prompts and evaluation sets, all reported
together.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args as resolved

import slime.data
from slime.config.args import Args
from slime.config.rollout import SFT_FUNCTION
from slime.data.validate import check_data
from slime.rollout.rm_hub import check_label


def make_args(**more: Any) -> Args:
    """As the flags say, without what is derived from them: no reward type follows from a label."""
    return Args(**{"input_key": "prompt", "label_key": "label", **more})


def write(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def numbers_only(rm_type: str, label: Any, metadata: Mapping[str, Any]) -> str | None:
    """A label check that says what it was asked."""
    name = metadata.get("rm_type", rm_type)
    return None if label and str(label).isdigit() else f"{name} cannot read {label!r}"


def test_good_data_has_no_problems(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "label": "4"}])
    args = make_args(prompt_data=path, eval_prompt_data=["one", path, "two", path + "@[:1]"])
    assert check_data(args, check_label) == [], "with the label check of the rewards themselves"


@pytest.mark.parametrize("keys", [None, {"image": "images"}])
def test_images_that_no_flag_names_are_told(tmp_path: Path, keys: dict[str, str] | None) -> None:
    rows = [{"prompt": "<image> What is it?", "label": "4", "images": ["data:image/png;base64,"]}]
    args = make_args(prompt_data=write(tmp_path / "a.jsonl", rows), multimodal_keys=keys)
    check_data(args, check_label)
    told = f"{args.prompt_data}: images are not read without --multimodal-keys"
    assert (told in args.notices) == (keys is None)


def test_everything_is_reported_together(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl",
        [{"prompt": "p", "label": "x"}, "{", {"label": "1"}, {"prompt": "p", "label": "7"}],
    )
    held_out = write(tmp_path / "eval.jsonl", [{"question": "p", "label": "1"}])
    args = make_args(
        prompt_data=train,
        eval_prompt_data=["a", held_out, "b", str(tmp_path / "absent.jsonl")],
        rm_type="math",
    )
    found = check_data(args, numbers_only)
    assert len(found) == 5
    assert found[0].startswith(f"{train}:2: ")
    assert found[1].startswith(f"{train}:3: no prompt column")
    assert found[2] == f"{train}:1: math cannot read 'x'"
    assert found[3].startswith(f"evaluation set a: {held_out}: ")
    assert found[4].startswith("evaluation set b: ") and "absent.jsonl" in found[4]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_that_no_run_could_copy_or_write(tmp_path: Path, suffix: str) -> None:
    deep = json.loads("[" * 300 + "]" * 300)
    rows = [{"prompt": "p", "label": "1"}, {"prompt": "\ud83d", "label": "1"}, {"prompt": "p\U0001f600", "label": "1"},
            {"prompt": "p", "label": "1", "metadata": {"x": deep}}]  # fmt: skip
    path = str(tmp_path / f"rows{suffix}")
    Path(path).write_text(
        json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))
    )
    found = check_data(make_args(prompt_data=path, rm_type="math"), check_label)
    assert len(found) == 2 and "surrogate pair" in found[0] and "than 100" in found[1]
    assert re.search(r":2: |row 2: ", found[0]) and re.search(r":4: |row 4: ", found[1])


def test_a_row_may_ask_for_another_verifier(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "label": "x", "metadata": {"rm_type": "f1"}}]
    found = check_data(
        make_args(prompt_data=write(tmp_path / "a.jsonl", rows), rm_type="math"), numbers_only
    )
    assert found == [f"{tmp_path}/a.jsonl:1: f1 cannot read 'x'"]


def test_optional_columns_of_training_rows_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "label": "1"}])
    (problem,) = check_data(
        make_args(prompt_data=path, eval_prompt_data=["a", path], metadata_key="info"), numbers_only
    )
    assert (
        problem.startswith(f"{path}: ")
        and "column 'info'" in problem
        and "have 'prompt', 'label'" in problem
    )


def test_rewards_without_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p"}] * 30)
    (problem,) = check_data(make_args(prompt_data=path), numbers_only)
    assert "'label', --label-key" in problem
    (problem,) = check_data(make_args(prompt_data=path, rm_type="deepscaler"), numbers_only)
    assert (
        problem.startswith(f"{path}: ")
        and "'label', --label-key" in problem
        and "deepscaler" in problem
    )


def test_labels_of_some_rows_and_of_evaluation_data_are_read(tmp_path: Path) -> None:
    some = write(tmp_path / "some.jsonl", [{"prompt": "p"}, {"prompt": "p", "label": "1"}])
    none = write(tmp_path / "none.jsonl", [{"prompt": "p"}])
    held_out = write(tmp_path / "held_out.jsonl", [{"prompt": "p", "label": "1"}])
    config = tmp_path / "eval.yaml"
    config.write_text(f"eval: {{datasets: [{{name: a, path: {held_out}, rm_type: math}}]}}")
    assert check_data(resolved(prompt_data=some, rm_type="math"), numbers_only) == [
        f"{some}:1: math cannot read None"
    ]
    args = resolved(prompt_data=none, custom_rm_path="mine.reward", eval_config=str(config))
    assert check_data(args, numbers_only) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"custom_rm_path": "mine.reward"},
        {"loss_type": "sft_loss"},
        {"custom_generate_function_path": "mine.py"},
        {"rollout_function_path": "mine.rollout"},
    ],
)
def test_labels_are_the_users_business(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p"}])
    assert check_data(make_args(prompt_data=path, **settings), numbers_only) == []


def test_conversations_with_nothing_to_train_are_told_by_row(tmp_path: Path) -> None:
    user, good = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"messages": made} for made in ([user, good], [user], "text", [user, good | {"weight": 0}])
    ]
    path = write(tmp_path / "sft.jsonl", rows)
    settings = {
        "loss_type": "sft_loss",
        "rollout_function_path": SFT_FUNCTION,
        "input_key": "messages",
    }
    assert check_data(make_args(prompt_data=f"{path}@[:1]", **settings), check_label) == []
    found = check_data(make_args(prompt_data=path, **settings), check_label)
    words = (
        "2: a conversation without an assistant",
        "3: SFT needs a list of messages",
        "4: no assistant turn of its",
    )
    assert len(found) == 3 and all(
        p.startswith(f"{path}:{w}") for p, w in zip(found, words, strict=True)
    ), found


def test_images_that_do_not_exist_are_told_by_row(tmp_path: Path) -> None:
    (tmp_path / "here.png").write_bytes(b"")
    here, gone = str(tmp_path / "here.png"), str(tmp_path / "gone.png")
    images = [here, f"file://{here}", "data:image/png;base64,AA", "https://example.org/a.png", {"path": here}, gone,
              {"path": gone, "bytes": None}, {"path": gone, "bytes": "AA"}, "A" * 5000]  # fmt: skip
    path = write(
        tmp_path / "a.jsonl",
        [{"prompt": "<image>", "label": "1", "images": [image]} for image in images],
    )
    settings = {"prompt_data": path, "multimodal_keys": {"image": "images"}}
    assert (
        check_data(
            make_args(custom_generate_function_path="mine.generate", **settings), check_label
        )
        == []
    )
    found = check_data(make_args(**settings), check_label)
    assert found[:2] == [f"{path}:{row}: there is no image {gone!r}" for row in (6, 7)]
    assert (
        len(found) == 3
        and found[2].startswith(f"{path}:9: ")
        and "'AAA" in found[2]
        and len(found[2]) < 300
    )


def test_when_prompts_are_needed() -> None:
    assert "give --prompt-data FILE" in check_data(make_args(), numbers_only)[0]
    for settings in (
        {"rollout_global_dataset": False},
        {"data_source_path": "mine.Source"},
        {"debug_train_only": True},
        {"load_debug_rollout_data": "dump_{rollout_id}.pt"},
    ):
        assert check_data(make_args(**settings), numbers_only) == []


def test_labels_are_checked_with_the_metadata_that_the_evaluation_gives(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "label": "Paris"}])
    config = tmp_path / "eval.yaml"
    entry = f"{{name: a, path: {path}, metadata_overrides: {{rm_type: f1}}}}"
    config.write_text(f"eval:\n  datasets:\n  - {entry}\n")
    args = make_args(rollout_global_dataset=False, eval_config=str(config), rm_type="last_number")
    assert check_data(args, check_label) == []


def test_reward_types_and_functions_of_evaluation_sets_and_rows_exist(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "label": "1", "metadata": {"rm_type": name}}
        for name in ("math", "maths", "boxed_math")
    ]
    path, plain = (
        write(tmp_path / "a.jsonl", rows),
        write(tmp_path / "b.jsonl", [{"prompt": "p", "label": "1"}]),
    )
    config = tmp_path / "eval.yaml"
    settings = ("rm_type: maths", "rm_type: remote_rm", "rm_type: boxed_math", "custom_rm_path: no_such_module.f",
                "custom_generate_function_path: no_such_file.py")  # fmt: skip
    sets = "".join(
        f"  - {{name: s{place}, path: {plain}, {entry}}}\n" for place, entry in enumerate(settings)
    )
    config.write_text(f"eval:\n  datasets:\n{sets}")
    found = check_data(
        make_args(prompt_data=path, eval_config=str(config), rm_type="math"), check_label
    )
    starts = (f"{path}:2: reward type maths: not one of", "evaluation set s0: rm_type maths: not one of",
              "evaluation set s1: rm_type remote_rm: needs --rm-url", "evaluation set s3: custom_rm_path: 'no_such",
              "evaluation set s4: custom_generate_function_path: the hook file 'no_such_file.py'")  # fmt: skip
    assert len(found) == len(starts) and all(map(str.startswith, found, starts)), found


def test_a_bad_eval_list_is_a_problem_too(tmp_path: Path) -> None:
    args = make_args(rollout_global_dataset=False, eval_prompt_data=["a", "b.jsonl", "c"])
    (problem,) = check_data(args, numbers_only)
    assert problem.startswith("--eval-prompt-data ") and "3 words: a b.jsonl c" in problem


def test_the_shared_data_sets_pass(datasets_dir: Path) -> None:
    dapo = f"{datasets_dir}/dapo/dapo_math_17k.parquet@[:500]"
    args = make_args(prompt_data=dapo, label_key="reward_model.ground_truth", rm_type="dapo")
    assert check_data(args, check_label) == []
    args = make_args(
        prompt_data=f"{datasets_dir}/math500/math500.jsonl", input_key="problem", label_key="answer"
    )
    assert check_data(args, check_label) == []


def test_every_argument_that_this_room_reads_exists() -> None:
    """Read as ``args.name`` or ``getattr(args, "name", ...)``; model shapes come from Megatron's
    own flags.
    """
    from slime.config.args import Args

    sources = [
        path.read_text()
        for path in sorted(Path(slime.data.__file__).parent.glob("*.py"))
        if path.name != "flops.py"
    ]
    names = {
        name
        for text in sources
        for name in re.findall(r"\bargs\.([a-z_]+)|getattr\((?:self\.)?args, \"([a-z_]+)\"", text)
    }
    read = {a or b for a, b in names}
    known = {field.name for field in dataclasses.fields(Args)}
    assert len(read) > 40
    assert read - known == {"num_layers", "moe_router_topk", "sglang_speculative_algorithm"}


@pytest.mark.real
def test_no_torch_and_no_transformers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "label": "4"}])
    code = f"""
import sys
from slime.config.args import Args
from slime.data.validate import check_data
from slime.rollout.rm_hub import check_label
args = Args(input_key="prompt", label_key="label", prompt_data={path!r}, eval_prompt_data=["a", {path!r}])
assert check_data(args, check_label) == [], check_data(args, check_label)
import slime.data.source, slime.data.convert, slime.data.packing, slime.data.masks, slime.utils.processing_utils
heavy = {{"torch", "transformers", "ray", "pyarrow", "aiohttp", "PIL"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_parquet_file_with_damaged_bytes_is_told_with_its_place(tmp_path: Path) -> None:
    """Whatever byte is wrong: Arrow raises errors of its own and plain ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from slime.config.files import first_row
    from slime.data.rows import DataError, RowFile

    good = tmp_path / "good.parquet"
    rows = {"prompt": [f"question {i}" for i in range(50)], "label": [str(i) for i in range(50)]}
    pq.write_table(pa.table(rows), good, row_group_size=10)
    whole, damaged, told = good.read_bytes(), tmp_path / "damaged.parquet", 0
    for position in range(0, len(whole), 7):
        damaged.write_bytes(
            whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :]
        )
        first_row(str(damaged))
        try:
            file = RowFile(str(damaged))
            file.read(range(min(len(file), 50)))
        except DataError as error:
            told += 1
            assert all(str(damaged) in problem for problem in error.problems)
    assert told > 20


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_first_row_that_nests_too_deeply(tmp_path: Path, suffix: str) -> None:
    from slime.config.files import first_row

    file = tmp_path / f"deep{suffix}"
    deep = 100_000  # the parser of Python 3.13 takes 5,000
    file.write_text(
        '{"prompt": ' + "[" * deep + "]" * deep + "}" if suffix == ".jsonl" else "[" * deep
    )
    assert first_row(str(file)) is None


def test_instructions_without_a_checker_are_told_by_row_though_no_row_has_a_label(
    tmp_path: Path,
) -> None:
    def row(*ids: str, **kwargs: Any) -> dict[str, Any]:
        return {
            "prompt": "p",
            "metadata": {"instruction_id_list": list(ids), "kwargs": [kwargs] * len(ids)},
        }

    good = [row("punctuation:no_comma"), row("count:numbers", N=3, keyword=None)]
    path = write(tmp_path / "rows.jsonl", [*good, row("words:start_verb"), row("count:numbers")])
    first, second = check_data(make_args(prompt_data=path, rm_type="ifbench"), check_label)
    assert (
        first.startswith(f"{path}:3: ") and "ifbench" in first and "id 'words:start_verb'" in first
    )
    assert "--custom-rm-path" in first and "allenai/IFBench" in first
    assert (
        second.startswith(f"{path}:4: ") and "count:numbers: " in second and "missing: N" in second
    )
    assert (
        check_data(
            make_args(prompt_data=write(tmp_path / "good.jsonl", good), rm_type="ifbench"),
            check_label,
        )
        == []
    )
