"""Keywords as the settings of a run; all problems come at once, in the words of the command
line.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
import yaml

import slime
from slime.api import arguments
from slime.api.arguments import parse
from slime.config.hooks import load_function
from slime.config.parser import ConfigError
from slime.data.rows import read_rows

ROWS = [{"prompt": "1 + 1 =", "label": "2"}, {"prompt": "1 + 2 =", "label": "3"}]


@pytest.fixture
def base(smollm2: Path) -> dict[str, Any]:
    return {"model": smollm2, "data": ROWS, "train_backend": "fsdp", "rollout_backend": "embedded"}


def test_importing_slime_is_cheap() -> None:
    code = (
        "import sys, slime\n"
        "assert 'train' in dir(slime) and slime.__version__\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'numpy', 'slime.api') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'trains'"):
        slime.trains  # noqa: B018
    assert (
        callable(slime.train)
        and issubclass(slime.ConfigError, ValueError)
        and slime.Trainer
        and slime.Result
    )


def test_keywords_are_flags(base: dict[str, Any], tmp_path: Path) -> None:
    args = parse(
        base
        | {
            "reward": "math",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 4,
            "lr": 1e-4,
            "use_kl_loss": True,
        }
        | {
            "eval_data": {"one": ROWS[:1], "two": ROWS},
            "sglang_mem_fraction_static": 0.5,
            "save": tmp_path / "s",
        }
        | {"eval_interval": 2, "num_rollout": None},
        tmp_path,
    )
    assert (args.rm_type, args.rollout_batch_size, args.global_batch_size, args.lr) == (
        "math",
        2,
        8,
        1e-4,
    )
    assert (
        args.use_kl_loss
        and args.sglang == {"mem_fraction_static": 0.5}
        and args.save == str(tmp_path / "s")
    )
    assert (
        {"lr", "rm_type"} <= args.explicit
        and "seed" not in args.explicit
        and args.num_rollout is None
    )
    names, paths = args.eval_prompt_data[::2], args.eval_prompt_data[1::2]  # type: ignore[index]
    assert names == ["one", "two"]
    assert [len(Path(path).read_text().splitlines()) for path in paths] == [1, 2]
    assert [
        json.loads(line) for line in Path(str(args.prompt_data)).read_text().splitlines()
    ] == ROWS


def test_functions_become_paths_that_any_process_can_load(
    base: dict[str, Any], tmp_path: Path
) -> None:
    wanted = "2"
    args = parse(
        base
        | {
            "reward": lambda response: response == wanted,
            "filter": lambda rewards: len(set(rewards)) > 1,
        }
        | {
            "loss_type": "custom_loss",
            "custom_loss_function_path": lambda args, batch, logits, sum_of_sample_mean: None,
        },
        tmp_path,
    )
    reward = load_function(str(args.custom_rm_path))
    assert reward(None, SimpleNamespace(prompt="", response="2", label="", metadata={})) == 1.0
    assert (
        args.dynamic_sampling_filter_path == f"{tmp_path / 'filter'}.py:filter"
        and not args.group_rm
    )
    assert args.custom_loss_function_path and args.rm_type is None


def test_a_reward_of_samples_scores_groups(base: dict[str, Any], tmp_path: Path) -> None:
    assert parse(base | {"reward": lambda samples: [0.0] * len(samples)}, tmp_path).group_rm


def test_all_problems_come_at_once(base: dict[str, Any], tmp_path: Path) -> None:
    lock = threading.Lock()
    wrong = {
        "reward": lambda response: lock.locked(),
        "filter": lambda one, two: True,
        "rollout_batch_sise": 3,
        "n_samples_per_prompt": "many",
        "max_restarts": 2,
        "lr": -1,
        "inline": False,  # other processes need a copy of each function
    }
    with pytest.raises(ConfigError) as raised:
        parse(base | wrong, tmp_path)
    text = "\n".join(raised.value.problems)
    for part in (
        "reward: it cannot be sent to the processes of the run: it uses lock (a lock)",
        "filter: the parameters 'one', 'two' are unknown",
        "rollout_batch_sise: no such flag; did you mean rollout_batch_size?",
        "n_samples_per_prompt: ",
        "max_restarts: only a command line can be run again",
        "lr -1: ",
    ):
        assert part in text
    assert len(raised.value.problems) == 6, text


def test_a_list_of_rewards_is_told_what_to_return(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(base | {"reward": [lambda response: 1.0, lambda response: 2.0]}, tmp_path)
    assert len(raised.value.problems) == 1 and "return a dict" in raised.value.problems[0]


def test_a_loaded_model_is_refused_as_such(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(base | {"reward": "math", "model": torch.nn.Linear(2, 3)}, tmp_path)
    assert "hf_checkpoint: needs a text, not Linear(in_features=2" in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


def test_a_program_that_changes_its_folder_writes_where_it_meant(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inputs").mkdir()
    monkeypatch.chdir(tmp_path)
    own = {"save": "kept", "save_hf": "hf/{rollout_id}", "save_interval": 1, "num_rollout": 1}
    args = parse(base | own | {"reward": "math"}, tmp_path / "inputs")
    assert args.save == str(tmp_path / "kept") and args.save_hf == str(tmp_path / "hf/{rollout_id}")


class Hidden:
    def __repr__(self) -> str:
        raise RuntimeError("not for others")


class Refusing:
    def tolist(self) -> list[int]:
        raise RuntimeError("not now")


def circle() -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": "x"}
    row["metadata"] = row
    return row


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "no rows"),
        ([1], "row 1 is a int"),
        ({"prompt": "x"}, "not a dict of 'prompt'"),
        (5, "not a int"),
        (b"abc", "not a bytes"),
        (
            io.StringIO("a line"),
            "path of the file",
        ),
        ([{"prompt": "x", "label": object()}], "row 1 cannot"),
        ([{"prompt": "x", "label": Hidden()}], "a Hidden"),
        ([{"prompt": "x", "label": Refusing()}], "a Refusing: not"),
        ([{"prompt": "x", "label": np.float32}], "data: row 1 cannot be written as JSON: a type"),
        ([{"prompt": "x", "label": float("nan")}], "NaN"),
        ([{"prompt": "x", "label": 10**5000}], "row 1 cannot"),
        ([{("a", 1): "x"}], "keys must"),
        (["\ud83d"], "surrogate pair"),
        ([{"prompt": "x", "metadata": {"\ud83d": 1}}], "surrogate pair"),
        ([circle()], "Circular reference"),
        ([{"prompt": "x", "metadata": nested(5000)}], "row 1 cannot"),
        ([{"prompt": "x", "metadata": nested(200)}], "more than 100"),
    ],
)
def test_wrong_rows_are_told(base: dict[str, Any], tmp_path: Path, data: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(base | {"data": data}, tmp_path)
    assert len(raised.value.problems) == 1 and told in raised.value.problems[0]


def test_all_wrong_rows_are_told_at_once(base: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": "x"}, 5, {"prompt": "\ud83d"}, None, *[[]] * 30]
    with pytest.raises(ConfigError) as raised:
        parse(base | {"data": rows, "eval_data": {"one": [7]}, "lr": -1}, tmp_path)
    problems = [one for one in raised.value.problems if one.startswith("data: ")]
    assert [one.partition(" is a")[0] for one in problems[:3:2]] == ["data: row 2", "data: row 4"]
    assert "row 3" in problems[1] and len(problems) == 21 and "13 more" in problems[-1]
    rest = [one for one in raised.value.problems if one not in problems]
    assert len(rest) == 2 and "eval_data: row 1" in rest[0] and rest[1].startswith("lr -1")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [{"prompt": "x"}, {"prompt": 1}],
            "row 2: the prompt 'prompt' must be a text or a list of messages, not int 1",
        ),
        (
            [{"question": "x"}],
            "no row has the prompt column 'prompt'; the rows have 'question': name it with --input-key",
        ),
    ],
)
def test_problems_with_rows_name_the_keyword_and_not_a_file_of_slime(
    base: dict[str, Any], tmp_path: Path, rows: list[dict[str, Any]], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(
            base
            | {"data": rows, "reward": "random", "eval_data": {"one": rows}, "eval_interval": 1},
            tmp_path,
        )
    assert raised.value.problems == [f"data: {told}", f"evaluation set one: eval_data: {told}"]


def test_a_table_that_cannot_be_read_is_told(base: dict[str, Any], tmp_path: Path) -> None:
    column = pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())
    with pytest.raises(ConfigError, match=r"data: .*UnicodeDecodeError"):
        parse(base | {"data": pyarrow.table({"prompt": column})}, tmp_path)


def test_missing_values_of_a_data_frame_are_none(tmp_path: Path) -> None:
    class Missing(Frame):
        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            return [{"prompt": "x", "label": float("nan")}, {"prompt": "y", "label": np.float64(2)}]

    path = Path(arguments.file_of(Missing(), tmp_path / "data.jsonl"))
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == [None, 2.0]


def test_rows_without_a_label_are_told_as_on_the_command_line(
    base: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no row has a label .*; the rows have 'prompt';"):
        parse(base | {"data": ["1 + 1 ="], "reward": "math"}, tmp_path)


def of_trl(completions: list[str], answer: list[str], **columns: list[Any]) -> list[float]:
    return [0.0 for _ in completions]


def test_a_column_that_the_reward_takes_and_no_row_has_is_told(
    base: dict[str, Any], tmp_path: Path
) -> None:
    """What people of TRL and verl type first."""
    rows = [{"prompt": "1 + 1 =", "answer": "2", "reward_model": {"ground_truth": "2"}}]
    for reward, column in (
        (of_trl, "answer"),
        (lambda response, label: float(label in response), "label"),
    ):
        with pytest.raises(ConfigError) as raised:
            parse(base | {"data": rows, "reward": reward}, tmp_path)
        (problem,) = raised.value.problems
        assert problem.startswith(f"reward: it takes {column!r}, ")
        assert "'answer', 'reward_model.ground_truth'" in problem and "label_key" in problem
    for fitting in (
        {"reward": of_trl, "label_key": "answer"},
        {"reward": of_trl, "data": [{"prompt": "1 + 1 =", "metadata": {"answer": "2"}}]},
        {"reward": lambda response, label: 0.0, "label_key": "reward_model.ground_truth"},
        {"reward": lambda response, label=None: 0.0},
        {"reward": lambda completions, **columns: [0.0 for _ in completions]},
    ):
        parse(base | {"data": rows} | fitting, tmp_path)


class Frame:
    """The part of a pandas data frame that is used."""

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"prompt": "x", "label": np.int64(3), "metadata": {"list": np.array([1, 2])}}]

    def itertuples(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        (iter(ROWS), ROWS),
        (
            [MappingProxyType({"prompt": "x", "metadata": MappingProxyType({"a": 1})})],
            [{"prompt": "x", "metadata": {"a": 1}}],
        ),
        (pyarrow.Table.from_pylist(ROWS), ROWS),
        (Frame(), [{"prompt": "x", "label": 3, "metadata": {"list": [1, 2]}}]),
    ],
)
def test_rows_of_every_kind(tmp_path: Path, data: Any, rows: list[dict]) -> None:
    path = Path(arguments.file_of(data, tmp_path / "data.jsonl"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_files_of_flags_are_read_before_single_settings(
    base: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "laptop.yaml"
    file.write_text(yaml.safe_dump({"rollout_batch_size": 2, "n_samples_per_prompt": 2}))
    args = parse(base | {"override": file, "n_samples_per_prompt": 4}, tmp_path)
    assert (args.rollout_batch_size, args.n_samples_per_prompt) == (2, 4)


@pytest.mark.parametrize("file", [5, {"lr": 1.0}, ["x.yaml"], "--lr"])
def test_a_file_of_flags_that_is_none_is_told(
    base: dict[str, Any], tmp_path: Path, file: Any
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(base | {"override": file, "lr": -1}, tmp_path)
    assert len(raised.value.problems) == 2, raised.value.problems
    assert any("override" in problem for problem in raised.value.problems)


def test_a_process_that_imports_the_program_starts_no_run(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of ``num_data_workers`` would start a run of its own, for which the first waits."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="below if __name__ == '__main__'"):
        parse(base, tmp_path)


def test_two_names_of_one_flag_are_refused(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.*hf_checkpoint"):
        parse(base | {"hf_checkpoint": "x"}, tmp_path)


def test_a_dry_run_prints_its_report(
    base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    slime.dry_run(
        **base, reward=lambda response, label: float(response == label), rollout_batch_size=1
    )
    assert "2 prompts: 1.0, 1.0" in capsys.readouterr().out


def test_a_real_data_frame_is_rows(base: dict[str, Any], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    frame = pandas.DataFrame({"prompt": ["x", "y"], "label": [3, 4]})
    path = Path(arguments.file_of(frame, tmp_path / "data.jsonl"))
    expected = [{"prompt": "x", "label": 3}, {"prompt": "y", "label": 4}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == expected
    args = parse(base | {"data": frame, "reward": "math"}, tmp_path)
    assert [row["label"] for row in read_rows(args.prompt_data)] == [3, 4]


def test_the_names_of_flags_do_for_those_of_keywords(base: dict[str, Any], tmp_path: Path) -> None:
    flags = {"hf_checkpoint": base["model"], "rm_type": "math", "custom_rm_path": None}
    given = {**base, "model": None, "reward": None, **flags}
    assert parse(given, tmp_path).hf_checkpoint == str(base["model"])
    with pytest.raises(ConfigError, match="model and hf_checkpoint are two names"):
        parse({**given, "model": base["model"]}, tmp_path)
