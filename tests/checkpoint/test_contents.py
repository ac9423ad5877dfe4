"""The pickles of a snapshot, which somebody else may have made, are read before anything starts."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from slime.checkpoint.contents import hostile_file
from slime.data.value_files import write_state


class Runs:
    """Unpickling it would create a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.made}",)


class Takes:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "__subclasses__")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "iter_0000001"
    dcp.save(
        {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        checkpoint_id=folder / "actor" / "dcp",
    )
    torch.save(
        {"python": (3, (1, 2), None), "torch": torch.get_rng_state()}, folder / "actor" / "rng_0.pt"
    )
    write_state(
        folder / "rollout" / "global_dataset_state_dict_1.pt",
        {"epoch": 1, "samples": [{"tokens": [1, 2]}]},
    )
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_snapshot_of_values_is_sound(snapshot: Path) -> None:
    assert hostile_file(snapshot) is None


@pytest.mark.parametrize(
    "name", ["dcp/.metadata", "rng_0.pt", "../rollout/state.pt", "dcp/__0_0.distcp"]
)
@pytest.mark.parametrize("kind", ["function", "attribute", "damaged", "plain pickle"])
def test_a_pickle_that_could_run_code_is_named_in_one_line(
    snapshot: Path, name: str, kind: str
) -> None:
    made = snapshot.parent / "made"
    file = (snapshot / "actor" / name).resolve()
    value: object = Takes() if kind == "attribute" else Runs(made)
    if name.endswith(".metadata") or kind == "plain pickle":
        packed = pickle.dumps(value)
    else:
        saved = io.BytesIO()
        torch.save({"x": value}, saved)
        packed = saved.getvalue()
    file.write_bytes(packed[: len(packed) // 3] if kind == "damaged" else packed)
    said = hostile_file(snapshot)
    assert said is not None and str(file) in said and "\n" not in said
    assert not made.exists()


def test_an_index_with_bytes_is_refused(snapshot: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": [1, 2]}, checkpoint_id=snapshot / "actor" / "dcp")
    assert "BytesStorageMetadata" in str(hostile_file(snapshot))


def test_classes_that_a_function_of_the_user_allows_are_left_to_it(snapshot: Path) -> None:
    torch.save({"x": io.BytesIO(b"1")}, snapshot / "rollout" / "state.pt")
    assert (
        "_io.BytesIO" in str(hostile_file(snapshot))
        and hostile_file(snapshot, own_classes=True) is None
    )
