"""A checkpoint that was found to fit its model is not compared again until something changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import llama_config, read_tensors, rewrite, save_model

from slime.models import checked
from slime.models.checked import check_checkpoint_once
from slime.models.shards import ModelError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slime" / "fitting-checkpoints"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the checkpoints that are really compared."""
    paths: list[str] = []
    compare = checked.compare_checkpoint

    def count(path: str, trust_remote_code: bool, by_transformers: bool) -> list[str]:
        paths.append(path)
        return compare(path, trust_remote_code, by_transformers)

    monkeypatch.setattr(checked, "compare_checkpoint", count)
    return paths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama_config(), tmp_path_factory.mktemp("model"))


def test_an_equal_checkpoint_is_compared_once(
    cache: Path, compared: list[str], model: Path, tmp_path: Path
) -> None:
    tensors = read_tensors(model)
    one = rewrite(
        model, tmp_path / "one", {**tensors, "mtp.weight": tensors["model.norm.weight"].clone()}
    )
    two = rewrite(
        model, tmp_path / "two", {**tensors, "mtp.weight": tensors["model.norm.weight"] + 1}
    )
    said = ["has 1 tensors that the model does not use: mtp.weight"]
    for folder in (one, one, two):  # values do not matter
        assert check_checkpoint_once(str(folder), False, True) == said
    assert compared == [str(one)]
    assert len(list(cache.iterdir())) == 1


def test_whatever_could_change_the_result_leads_to_a_comparison(
    cache: Path, compared: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_checkpoint_once(str(model), False, True) == []
    assert check_checkpoint_once(str(model), False, by_transformers=False) == []
    assert check_checkpoint_once(str(model), trust_remote_code=True, by_transformers=True) == []
    assert len(compared) == 3
    tensors = read_tensors(model)
    del tensors["model.norm.weight"]
    part = rewrite(model, tmp_path / "part", tensors)
    for _ in range(2):  # what does not fit is compared, and refused, each time
        with pytest.raises(ModelError, match=r"lacks 1 tensors: model\.norm\.weight"):
            check_checkpoint_once(str(part), False, True)
    assert len(compared) == 5
    text = (model / "config.json").read_text()
    changed = rewrite(model, tmp_path / "changed", read_tensors(model))
    (changed / "config.json").write_text(text.replace("}", ', "new": 1}', 1))
    check_checkpoint_once(str(changed), False, True)
    for changed_package in ("transformers", "torch"):
        newer = {changed_package: "99.0"}
        monkeypatch.setattr(checked, "version", lambda name, newer=newer: newer.get(name, "1.0"))
        check_checkpoint_once(str(model), False, True)
    assert len(compared) == 8
    check_checkpoint_once(str(model), False, True)
    assert len(compared) == 8


def test_a_damaged_or_unwritable_cache_only_costs_time(
    cache: Path, compared: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_checkpoint_once(str(model), False, True)
    (file,) = cache.iterdir()
    file.write_text("[")
    assert check_checkpoint_once(str(model), False, True) == [] and len(compared) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(model / "config.json"))  # no folder
    assert check_checkpoint_once(str(model), False, True) == [] and len(compared) == 3


@pytest.mark.real
def test_a_known_checkpoint_is_checked_without_torch(cache: Path, model: Path) -> None:
    check_checkpoint_once(str(model), False, True)
    code = (
        "import sys; from slime.models.checked import check_checkpoint_once; "
        "print(check_checkpoint_once(sys.argv[1], False, True), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(model)]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == "[] False\n"
    )
