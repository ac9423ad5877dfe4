"""FSDP starts from checkpoints of Megatron-LM, and uses them as its reference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import VOCAB, make_args, save_tiny_llama, save_tiny_qwen3_moe

from slime.backends.create import create_backend
from slime.backends.fsdp.hf_weights import iter_hf_weights
from slime.cluster.checks import check_snapshots
from slime.config.rules import Run
from slime.plugins.megatron.flags import check_megatron_lm
from slime.weights.hf_folder import HfFolder

sys.path.append(str(Path(__file__).resolve().parents[1] / "plugins" / "megatron"))
from megatron_lm_folders import stacked, their_names, write


@pytest.fixture(autouse=True)
def leave_no_process_group() -> Iterator[None]:
    """A backend joins one, and other tests of this process make their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_equal(got: dict[str, torch.Tensor], folder: Path) -> None:
    source = HfFolder(folder)
    assert set(got) == set(source.shapes())
    for name, tensor in got.items():
        assert torch.equal(tensor, source.get(name)), name


@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_qwen3_moe])
def test_initial_weights_and_reference_of_megatron_lm(tmp_path: Path, save: type) -> None:
    """``--load`` and ``--ref-load`` have other weights than ``--hf-checkpoint``, and other
    iterations than the last.
    """
    base, other, third = (
        save(tmp_path / name, seed=seed) for seed, name in enumerate(("base", "other", "third"))
    )
    folder = tmp_path / "theirs"
    write(write(folder, their_names(other), 20), their_names(third), 100)
    args = make_args(
        base, load=str(folder), ref_load=str(folder), ref_ckpt_step=20, use_kl_loss=True
    )
    backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", 0)
    for tag, expected in (("actor", third), ("ref", other)):
        with backend.bank.using(tag):
            assert_equal(dict(iter_hf_weights(backend.scorer.hf, torch.float32)), expected)
    backend.save_hf(tmp_path / "out")
    assert_equal(
        {name: HfFolder(tmp_path / "out").get(name) for name in HfFolder(third).shapes()}, third
    )


def test_without_load_the_reference_gives_the_initial_weights(tmp_path: Path) -> None:
    base, other = save_tiny_llama(tmp_path / "base"), save_tiny_llama(tmp_path / "other", seed=1)
    folder = write(tmp_path / "theirs", stacked(their_names(other)), None)
    backend: Any = create_backend(
        make_args(base, ref_load=str(folder)), "actor", 0, 1, "127.0.0.1", 0
    )
    assert_equal(dict(iter_hf_weights(backend.scorer.hf, torch.float32)), other)


def test_what_does_not_fit_is_told_before_the_start(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    tensors = their_names(base)
    args = make_args(
        base,
        load=str(write(tmp_path / "theirs", tensors)),
        ref_load=str(base),
        train_backend="fsdp",
    )
    assert check_megatron_lm(args) == [] and check_snapshots(Run(args)) == []
    assert "only the weights" in args.notices[-1] and "first rollout" in args.notices[-1]
    args.save = args.load
    (problem,) = check_snapshots(Run(args))
    assert problem.startswith(f"--save {args.save} holds checkpoints that slime did not write")
    args.save, args.lora_rank = None, 4
    assert "--lora-rank" in check_megatron_lm(args)[0]
    args.lora_rank, args.ckpt_step = 0, 7
    assert "checkpoints" in check_snapshots(Run(args))[0]  # there is no iteration 7
    args.ckpt_step = None
    del tensors["decoder.final_layernorm.weight"]
    args.ref_load = str(write(tmp_path / "broken", tensors))
    (problem,) = check_megatron_lm(args)
    assert (
        problem.startswith("--ref-load: checkpoint")
        and "1 parameters: model.norm.weight" in problem
    )
    wider = save_tiny_llama(tmp_path / "wider", vocab_size=VOCAB - 1)
    args.ref_load = None
    args.load = str(
        write(tmp_path / "wide", their_names(save_tiny_llama(tmp_path / "w", intermediate_size=40)))
    )
    args.hf_checkpoint = str(wider)
    assert "shape than --hf-checkpoint" in check_megatron_lm(args)[0]
