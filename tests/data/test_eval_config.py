"""Evaluation data sets: each setting from its entry, else the defaults, else args."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.config.args import Args
from slime.utils.eval_config import resolve_eval_datasets


def make_args(**more: Any) -> Args:
    return Args(**{"input_key": "q", **more})


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "eval.yaml"
    file.write_text(text)
    return str(file)


def test_pairs_and_the_single_legacy_value() -> None:
    args = make_args(eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl"], eval_temperature=0.5)
    assert [(d.name, d.path, d.temperature) for d in resolve_eval_datasets(args)] == [
        ("a", "a.jsonl", 0.5),
        ("b", "b.jsonl", 0.5),
    ]
    assert resolve_eval_datasets(make_args(eval_prompt_data=["x.jsonl"]))[0].name == "aime"
    assert resolve_eval_datasets(make_args()) == []


def test_entry_then_defaults_then_args(tmp_path: Path) -> None:
    text = """
eval:
  defaults: {temperature: 0.6, n_samples_per_eval_prompt: 4}
  datasets:
    - {name: a, path: a.jsonl, temperature: 0.0, rm_type: f1}
    - {name: b, path: b.jsonl, input_key: question, metadata_overrides: {x: 1}}
"""
    args = make_args(eval_config=write(tmp_path, text), rm_type="math", rollout_top_p=0.8)
    a, b = resolve_eval_datasets(args)
    assert (a.temperature, a.rm_type, a.n_samples_per_eval_prompt, a.top_p, a.input_key) == (
        0.0,
        "f1",
        4,
        0.8,
        "q",
    )
    assert (b.temperature, b.rm_type, b.input_key, b.metadata_overrides) == (
        0.6,
        "math",
        "question",
        {"x": 1},
    )
    assert a.prompt_maker().keys.prompt == "q" and a.stop is None


def test_datasets_by_name(tmp_path: Path) -> None:
    text = "eval: {datasets: {a: {path: a.jsonl}, b: b.jsonl}}"
    assert [
        (d.name, d.path)
        for d in resolve_eval_datasets(make_args(eval_config=write(tmp_path, text)))
    ] == [
        ("a", "a.jsonl"),
        ("b", "b.jsonl"),
    ]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "eval: {defaults: {temprature: 1}, datasets: [{name: a, path: p}]}",
            ValueError,
            "eval.defaults: temprature",
        ),
        ("eval: {datasets: [{name: a, path: p, colour: 1}]}", TypeError, r"'a'.*colour"),
        ("eval: {datasets: [{name: a, path: p, rm_typ: f1}]}", TypeError, "did you mean rm_type"),
        ("eval: {datasets: [{name: a, path: p, top_p: 5}]}", ValueError, "top_p 5"),
        (
            "eval: {defaults: {max_response_len: 0}, datasets: [{name: a, path: p}]}",
            ValueError,
            "least 1",
        ),
        (
            "eval: {datasets: [{name: a, path: p, metadata_overrides: [1]}]}",
            TypeError,
            "metadata_overrides",
        ),
        ("eval: {datasets: [{name: a}]}", ValueError, "name and path"),
        ("eval: {datasets: [{name: a, path: p}, {name: a, path: q}]}", ValueError, "once: a"),
        ("datasets: []", ValueError, "needs eval:"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_eval_datasets(make_args(eval_config=write(tmp_path, text)))


def test_an_absent_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"--eval-config nowhere\.yaml"):
        resolve_eval_datasets(make_args(eval_config="nowhere.yaml"))
