"""Models of a hub: asked once, and for a few seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tiny_checkpoints import llama_config, read_tensors, save_model

from slime.backends.fsdp.hf_weights import save_hf_checkpoint
from slime.cluster.checks import check_all
from slime.config.rules import Run
from slime.models.loading import ModelError, load_hf_config, load_hf_model
from slime.models.shards import require_hub, resolve_folder

NAME = "owner/model"


@pytest.fixture(params=["offline", "unreachable"])
def no_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of a machine without a network; nothing listens at the address of its hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "offline")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if request.param == "offline" else "0")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "cache"))
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_that_is_nowhere_is_refused_with_what_to_do(no_hub: Path) -> None:
    for read in (require_hub, resolve_folder, load_hf_config):
        with pytest.raises(ModelError, match=f"^{NAME}.*{NAME}") as refused:
            read(NAME)
        assert "\n" not in str(refused.value)


def test_a_run_with_such_a_model_has_one_problem(no_hub: Path) -> None:
    from make_args import make_args

    args = make_args(hf_checkpoint=NAME, apply_chat_template=True, prompt_data="absent.jsonl")
    (problem,) = check_all(Run(args))
    assert problem.startswith(f"--hf-checkpoint: {NAME} is not on this machine")


@pytest.mark.parametrize("pickled", [False, True])
def test_a_model_in_the_cache_is_used_and_no_hub_is_asked_again(
    no_hub: Path, pickled: bool, tmp_path: Path
) -> None:
    """Also with weights in PyTorch's older format; an export of it has all of its other files."""
    snapshot = no_hub / "models--owner--model" / "snapshots" / "abc"
    save_model(llama_config(), snapshot)
    (no_hub / "models--owner--model" / "refs").mkdir()
    (no_hub / "models--owner--model" / "refs" / "main").write_text("abc")
    (snapshot / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    if pickled:
        torch.save(read_tensors(snapshot), snapshot / "pytorch_model.bin")
        (snapshot / "model.safetensors").unlink()
    require_hub(NAME)
    assert os.environ["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
    assert resolve_folder(NAME) == snapshot and load_hf_config(NAME).hidden_size == 32
    model = load_hf_model(NAME, torch.float32, "cpu")
    save_hf_checkpoint(model, tmp_path / "out", torch.float32, NAME, writer=True)
    name = "generation_config.json"
    assert (tmp_path / "out" / name).read_bytes() == (snapshot / name).read_bytes()
