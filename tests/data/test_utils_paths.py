"""The documented import paths lead to the code of this room, and the small helpers do what they
say.
"""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from make_args import make_args
from PIL import Image

from slime.data.media import load_image
from slime.data.rows import DataError
from slime.observability.logging_utils import logged_into
from slime.rollout.data_source import DataSource
from slime.rollout.filter_hub.base_types import MetricGatherer
from slime.utils.data import read_file
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.logging_utils import log
from slime.utils.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
)
from slime.utils.misc import Box, SingletonMeta, exec_command, get_free_port, load_function
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    process_vision_info,
)
from slime.utils.types import MultimodalTypes, Sample

PAGE = Path(__file__).resolve().parents[2] / "docs" / "en" / "reference" / "import_paths.md"
PATHS = re.findall(r"^- `(slime\.[\w.]+)`: (`.+`)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("module", "names"), PATHS)
def test_documented_paths(module: str, names: str) -> None:
    for name in re.findall(r"`(\w+)`", names):
        assert getattr(importlib.import_module(module), name), name


def test_the_page_lists_every_thin_module() -> None:
    utils = sorted(path.stem for path in (PAGE.parents[3] / "slime" / "utils").glob("[a-z]*.py"))
    listed = dict(PATHS)
    assert [name for name in utils if f"slime.utils.{name}" not in listed] == []
    for name in utils:
        exported = set(importlib.import_module(f"slime.utils.{name}").__all__)
        assert exported == set(re.findall(r"`(\w+)`", listed[f"slime.utils.{name}"])), name


def test_small_helpers(tmp_path: Path) -> None:
    assert Box([1]).inner == [1]
    assert exec_command("printf 5", capture_output=True) == "5" and exec_command("true") is None
    with pytest.raises(subprocess.CalledProcessError):
        exec_command("exit 3")
    port = get_free_port(20000, consecutive=2)
    with socket.create_server(("127.0.0.1", port)):
        assert get_free_port(port) > port
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n{"a": 3}\n')
    assert list(read_file(f"{tmp_path}/rows.jsonl@[1:]")) == [{"a": 2}, {"a": 3}]
    (tmp_path / "rows.jsonl").write_text("[]\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*JSON"):
        list(read_file(str(tmp_path / "rows.jsonl")))


def test_images_for_engines_and_processors() -> None:
    image = Image.new("RGB", (2, 3), "red")
    url = encode_image_for_rollout_engine(image)
    assert url.startswith("data:image/png;base64,") and load_image(url).size == (2, 3)
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": url}, {"type": "text", "text": "?"}],
        }
    ]
    media = process_vision_info(messages)
    assert [i.size for i in media["images"]] == [(2, 3)] and process_vision_info([]) == {}
    kwargs = build_processor_kwargs(media)
    assert kwargs["images_kwargs"] == {"return_tensors": "pt"} and kwargs["text_kwargs"] == {
        "return_tensors": None
    }
    assert [kind.name for kind in MultimodalTypes.all()] == ["image", "video", "audio"]


def test_number_of_engines() -> None:
    assert (
        get_rollout_num_engines(make_args(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)) == 4
    )
    assert get_rollout_num_engines(make_args(rollout_external_engine_addrs=["a:1", "b:2"])) == 2


def test_counters_by_their_older_names() -> None:
    spec = Sample.SpecInfo(2, 4, 3, 6)
    assert (spec.spec_accept_rate, spec.spec_accept_length) == (0.5, 2.0)
    assert Sample.SpecInfo.from_dict(spec.to_dict()) == spec
    cache = Sample.PrefixCacheInfo(1, 4)
    assert (
        cache.prefix_cache_hit_rate == 0.25
        and Sample.PrefixCacheInfo.from_dict(cache.to_dict()) == cache
    )


def test_a_data_source_of_the_documented_base_class() -> None:
    class Mine(DataSource):
        def get_samples(self, num_samples: int) -> list[Any]:
            return []

        def add_samples(self, samples: list[Any]) -> None: ...

        def save(self, rollout_id: int) -> None: ...

        def load(self, rollout_id: int | None = None) -> None: ...

    assert len(Mine()) == 0 and bool(Mine())
    with pytest.raises(TypeError, match="get_samples"):
        DataSource()  # type: ignore[abstract]


def test_what_a_logging_function_logs_joins_the_metrics() -> None:
    metrics = {"a": 1.0}
    with logged_into(metrics):
        log(
            make_args(),
            {"rollout/step": 3, "mine": torch.tensor(2.0), "a": 4},
            step_key="rollout/step",
        )
    log(make_args(), {"late": 1})
    assert metrics == {"a": 4.0, "mine": 2.0}
    with pytest.raises(ValueError, match="'x'"):
        log(make_args(), {"x": "y"})


def test_statistics() -> None:
    assert compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    assert compute_statistics([]) == {} and dict_add_prefix({"a": 1}, "p/") == {"p/a": 1}
    assert compute_pass_rate([1, 0, 0, 0], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    with pytest.raises(ValueError, match=r"3 rewards.*1 groups of 2"):
        compute_pass_rate([1, 0, 0], 2)
    given = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 4}
    assert compute_rollout_step(make_args(**given, wandb_always_use_train_step=True), 3) == 6
    assert compute_rollout_step(make_args(**given, wandb_always_use_train_step=False), 3) == 3


def test_drops_are_counted_by_reason() -> None:
    gatherer = MetricGatherer()
    for reason in ("zero_std", None, "zero_std"):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_zero_std": 2}


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
    for name, named in (
        ("/no/such/folder", "/no/such/folder"),
        (str(tmp_path), "no tokenizer"),
        ("", "--hf-checkpoint"),
    ):
        with pytest.raises(FileNotFoundError, match=named):
            load_tokenizer(name)
    assert load_processor(str(tmp_path)) is None


def test_one_tokenizer_per_process(smollm2: Path) -> None:
    assert load_tokenizer(smollm2) is load_tokenizer(str(smollm2))
    assert load_processor(smollm2) is None
