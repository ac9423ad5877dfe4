"""The deadlines of a weight sync lie within those of what waits for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_args import make_args

from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import Sender
from slime.weights.update import transformed, transforms_of


def test_a_frozen_engine_is_given_up_before_the_other_ranks_give_up_the_sender() -> None:
    """They wait in a collective operation, whose end would break the process group of the
    trainer.
    """
    args = make_args(distributed_timeout_minutes=1, phase_timeout=3600.0)
    assert WeightSyncSettings.from_args(args).step_seconds == 48.0
    args = make_args(distributed_timeout_minutes=60, phase_timeout=100.0)
    assert WeightSyncSettings.from_args(args).step_seconds == 90.0


@pytest.mark.parametrize(
    ("family", "tied", "backend", "expected"),
    [
        ("Qwen3Moe", True, "sglang", True),
        ("Qwen3Moe", True, "embedded", False),
        ("Qwen3Moe", False, "sglang", False),
        ("Qwen3", True, "sglang", False),
    ],
)
def test_whether_engines_hold_a_tied_output_layer_of_their_own(
    family: str, tied: bool, backend: str, expected: bool, tmp_path: Path
) -> None:
    config = {"architectures": [f"{family}ForCausalLM"], "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = make_args(hf_checkpoint=str(tmp_path), rollout_backend=backend)
    assert WeightSyncSettings.from_args(args).untied_engines is expected


def test_engines_that_were_started_in_another_folder_get_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would take a relative path that it does not find for the name of a model on the
    hub.
    """
    monkeypatch.chdir(tmp_path)
    settings = WeightSyncSettings.from_args(make_args(update_weight_disk_dir="shared/weights"))
    assert settings.disk_dir == str(tmp_path / "shared/weights")


@pytest.mark.parametrize(
    ("held", "ours"),
    [
        (["1.3", "1.4"], True),
        (["1.3", "0.4"], False),
        (["1.3", "10.4"], False),
        (["default"], False),
    ],
)
def test_frozen_tensors_are_left_out_only_where_engines_hold_versions_of_this_attempt(
    held: list[str], ours: bool
) -> None:
    sender: Any = Sender.__new__(Sender)
    sender.version = "1.5"
    sender.check_equal = False
    sender.settings = WeightSyncSettings.from_args(make_args())
    infos = {
        f"engine {i}": SimpleNamespace(weight_version=version) for i, version in enumerate(held)
    }
    plan: Any = SimpleNamespace(infos=infos)
    sender.updated = set(infos)
    assert sender.engines_are_ours(plan) is ours
    for files in ({}, {"update_weight_mode": "delta"}):
        args = make_args(update_weight_transport="disk", update_weight_disk_dir="/shared", **files)
        sender.settings = WeightSyncSettings.from_args(args)
        assert not sender.engines_are_ours(plan), "a version in a folder has all tensors"


@pytest.mark.parametrize(
    ("left_out", "sent"), [(False, ["a.weight", "b.weight"]), (True, ["b.weight"])]
)
def test_engines_that_may_lack_the_frozen_tensors_get_them(left_out: bool, sent: list[str]) -> None:
    settings = WeightSyncSettings.from_args(make_args(freeze_params_name_list=["^a"]))
    tensors = [("a.weight", torch.ones(2)), ("b.weight", torch.ones(2))]
    assert [
        name for name, _ in transformed(tensors, transforms_of(settings, None, left_out))
    ] == sent


def test_frozen_parts_are_sent_beside_a_trained_part_of_the_same_tensor_of_sglang() -> None:
    """As with a merged adapter on q_proj and v_proj."""
    settings = WeightSyncSettings.from_args(
        make_args(only_train_params_name_list=[r"(q|v)_proj\."])
    )
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    tensors = [(f"model.layers.3.{part}.weight", torch.ones(2, 2)) for part in parts]
    sent = [
        name
        for name, _ in transformed(tensors, transforms_of(settings, None, leave_out_frozen=True))
    ]
    assert sent == [name for name, _ in tensors[:3]]
