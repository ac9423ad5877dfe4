"""The documented import paths lead to the code of this room, and the small helpers do what they say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "slime.utils.types",
            ["Sample", "SpecInfo", "PrefixCacheInfo", "ParamInfo", "RolloutBatch", "MultimodalTypes"],
        ),
        ("slime.utils.data", ["Dataset"]),
        ("slime.utils.misc", ["load_function", "SingletonMeta"]),
        ("slime.utils.mask_utils", ["MultiTurnLossMaskGenerator"]),
        ("slime.utils.dp_schedule", ["build_dp_schedule"]),
        ("slime.utils.eval_config", ["EvalDatasetConfig"]),
        ("slime.utils.processing_utils", ["load_tokenizer", "load_processor"]),
        ("slime.rollout.data_source", ["RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]),
    ],
)
def test_documented_paths(module: str, names: list[str]) -> None:
    for name in names:
        assert getattr(importlib.import_module(module), name)


def test_singleton() -> None:
    class One(metaclass=SingletonMeta):
        def __init__(self, value: int) -> None:
            self.value = value

    class Other(One):
        pass

    assert One(1) is One(2) and One(3).value == 1
    assert Other(5).value == 5
    One.clear()
    assert One(7).value == 7
    assert load_function("slime.utils.misc.load_function") is load_function


def test_tokenizer_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint folder /no/such/folder does not exist"):
        load_tokenizer("/no/such/folder")
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set --hf-checkpoint"):
        load_tokenizer("")
    assert load_processor(str(tmp_path)) is None


def test_one_tokenizer_per_process(smollm2: Path) -> None:
    assert load_tokenizer(smollm2) is load_tokenizer(str(smollm2))
    assert load_processor(smollm2) is None
