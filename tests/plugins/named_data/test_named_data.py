"""``--prompt-data ORGANIZATION/NAME:CONFIGURATION:SPLIT`` with the real package and folders that
these tests write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.config.data import derive_named_data
from slime.config.files import NamedDataError
from slime.data.dataset import Dataset
from slime.data.eval_config import resolve_eval_datasets
from slime.plugins import named_data
from slime.plugins.named_data import DataName, data_name, known_sets, mapped

ROWS = [{"question": f"{i} + 1?", "answer": f"So it is\n#### {i + 1}"} for i in range(5)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    named_data.file_of_name.cache_clear()
    return tmp_path / "cache" / "slime" / "datasets"


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A folder in the place of the data set of the hub, with two configurations."""
    pytest.importorskip("datasets", reason="pip install 'slime-rl[datasets]'")
    folder = tmp_path / "openai" / "gsm8k"
    folder.mkdir(parents=True)
    for name, rows in {
        "main_train": ROWS,
        "main_test": ROWS[:2],
        "socratic_train": ROWS[:1],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(
        "---\n"
        "configs:\n"
        "- config_name: main\n"
        "  data_files:\n"
        "  - {split: train, path: main_train.jsonl}\n"
        "  - {split: test, path: main_test.jsonl}\n"
        "- config_name: socratic\n"
        "  data_files:\n"
        "  - {split: train, path: socratic_train.jsonl}\n"
        "---\n"
    )
    return folder


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("openai/gsm8k:main:train", DataName("openai/gsm8k", "main", "train", "")),
        ("openai/gsm8k", DataName("openai/gsm8k", "main", "train", "")),
        ("openai/gsm8k:test", DataName("openai/gsm8k", "main", "test", "")),
        ("openai/gsm8k:socratic", DataName("openai/gsm8k", "socratic", "train", "")),
        ("openai/gsm8k:main:test@[:10]", DataName("openai/gsm8k", "main", "test", "@[:10]")),
        ("some/set:default:train[:10%]", DataName("some/set", "default", "train[:10%]", "")),
        ("some/set:train", DataName("some/set", None, "train", "")),
        ("some/set", None), ("data/train.jsonl", None), ("data.parquet@[1:2]", None), ("/abs/x.jsonl", None),
        ("a/b/c:main:train", None), ("prompts", None),
    ],
)  # fmt: skip
def test_a_name_is_told_from_a_path(text: str, name: DataName | None) -> None:
    assert data_name(text) == name


def test_the_rows_of_a_known_set_get_their_columns_and_their_reward(
    gsm8k: Path, own_cache: Path
) -> None:
    args = make_args(prompt_data="openai/gsm8k:main:train@[1:4]")
    assert args.rm_type == "math" and args.math_answer == "any"
    assert args.prompt_data is not None and args.prompt_data.endswith(".jsonl@[1:4]")
    data = Dataset(args.prompt_data, label_key=args.label_key)
    assert [sample.prompt for sample in data.samples] == ["1 + 1?", "2 + 1?", "3 + 1?"]
    assert data.samples[0].label == ROWS[1]["answer"]
    assert len(list(own_cache.iterdir())) == 1 and "its rows are in" in " ".join(args.notices)


def test_flags_take_precedence_over_the_table(gsm8k: Path) -> None:
    args = make_args(prompt_data="openai/gsm8k", rm_type="last_number", input_key="answer")
    assert args.rm_type == "last_number"
    assert (
        args.prompt_data
        and Dataset(args.prompt_data, prompt_key=args.input_key).samples[0].prompt
        == ROWS[0]["answer"]
    )


def test_configuration_and_split_select_the_rows(gsm8k: Path) -> None:
    counts = {}
    for name in (
        "openai/gsm8k:test",
        "openai/gsm8k:socratic:train",
        "openai/gsm8k:main:train[:60%]",
    ):
        args = make_args(prompt_data=name)
        counts[name] = len(Dataset(str(args.prompt_data)))
    assert list(counts.values()) == [2, 1, 3]


def test_evaluation_sets_have_names_too(gsm8k: Path, tmp_path: Path) -> None:
    args = make_args(eval_prompt_data=["held", "openai/gsm8k:main:test"], eval_interval=1)
    (config,) = resolve_eval_datasets(args)
    assert len(Dataset(config.path)) == 2
    (tmp_path / "eval.yaml").write_text(
        "eval:\n  datasets:\n  - {name: held, path: 'openai/gsm8k:main:nothing'}\n"
    )
    with pytest.raises(ValueError, match="openai/gsm8k:main:nothing"):
        resolve_eval_datasets(make_args(eval_config=str(tmp_path / "eval.yaml"), eval_interval=1))


def test_a_folder_of_the_users_is_a_name_with_its_own_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'slime-rl[datasets]'")
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([{"prompt": "a", "label": "b"}])}
    ).save_to_disk("mine")
    args = make_args(prompt_data="mine:default:train", rm_type="f1")
    assert Dataset(str(args.prompt_data)).samples[0].label == "b"


def test_a_changed_folder_is_read_again_and_an_unchanged_one_is_not(
    gsm8k: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_args(prompt_data="openai/gsm8k").prompt_data
    named_data.file_of_name.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        assert make_args(prompt_data="openai/gsm8k").prompt_data == first, (
            "the file is there, the package is not asked"
        )
    (gsm8k / "main_train.jsonl").write_text(
        json.dumps({"question": "new?", "answer": "#### 1"}) + "\n"
    )
    named_data.file_of_name.cache_clear()
    assert make_args(prompt_data="openai/gsm8k").prompt_data != first


def problems_of(name: str) -> str:
    args = make_args()
    args.prompt_data = name
    return " ".join(derive_named_data(False, args.notices, data=args, reward=args))


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'slime-rl[datasets]'" in problems_of("openai/gsm8k")


def test_without_a_network_the_error_says_what_to_do() -> None:
    # the tests set HF_HUB_OFFLINE
    pytest.importorskip("datasets", reason="pip install 'slime-rl[datasets]'")
    said = problems_of("openai/gsm8k:main:train")
    assert "the hub" in said and "--repo-type dataset openai/gsm8k" in said


def test_a_missing_column_and_a_missing_split_are_told(gsm8k: Path, tmp_path: Path) -> None:
    assert "datasets" in problems_of("openai/gsm8k:main:validation")
    for split in ("train", "test"):
        (gsm8k / f"main_{split}.jsonl").write_text('{"q": "x"}\n')
    named_data.file_of_name.cache_clear()
    assert "row 1 of openai/gsm8k" in problems_of("openai/gsm8k:main:train")
    (tmp_path / "two").mkdir()
    for split in ("train", "test"):
        (tmp_path / "two" / f"{split}.jsonl").write_text('{"prompt": "x"}\n')
    assert "splits" in problems_of("two:default")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "q"}, {"prompt": "Q"}),
        ({"label": "r.truth"}, {"label": "7"}),
        ({"prompt": "Do {q}: {tests}"}, {"prompt": "Do Q: a\nb"}),
        (
            {"label": {"test": "q", "deep": {"x": "r.truth"}}},
            {"label": {"test": "Q", "deep": {"x": "7"}}},
        ),
    ],
)
def test_columns_are_paths_texts_or_objects(
    columns: dict[str, Any], expected: dict[str, Any]
) -> None:
    row = {"q": "Q", "r": {"truth": "7"}, "tests": ["a", "b"]}
    assert mapped(row, columns) == row | expected


def test_the_table_is_well_formed() -> None:
    from slime.registry import parts

    for name, entry in known_sets().items():
        assert data_name(name) is not None, name
        assert (
            entry.keys() <= {"config", "split", "prompt", "label", "metadata", "rm_type"}
            and "prompt" in entry
        )
        assert entry.get("rm_type", "math") in parts("reward")


def test_the_columns_of_the_table_are_those_of_the_real_sets(datasets_dir: Path) -> None:
    """For the sets that are on this machine."""
    import pyarrow.parquet as parquet

    files = {
        "openai/gsm8k": "gsm8k/train.jsonl", "HuggingFaceH4/MATH-500": "math500/math500.jsonl",
        "HuggingFaceH4/aime_2024": "aime/aime24.jsonl", "BytedTsinghua-SIA/DAPO-Math-17k": "dapo/dapo_math_17k.parquet",
    }  # fmt: skip
    for name, file in files.items():
        path = datasets_dir / file
        if path.suffix == ".parquet":
            row = next(parquet.ParquetFile(path).iter_batches(1)).to_pylist()[0]
        else:
            row = json.loads(path.open().readline())
        made = mapped(row, known_sets()[name])
        assert made["prompt"] and made["label"], name


def test_a_column_that_is_no_text_is_told(own_cache: Path) -> None:
    with pytest.raises(NamedDataError, match="row 1"):
        named_data.write_rows(
            own_cache / "x.jsonl", [{"image": b"x"}], {}, DataName("x", None, None, "")
        )
    assert not list(own_cache.iterdir()), "nothing half-written is left"
