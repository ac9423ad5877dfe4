"""Families with other kinds of layers in the FSDP backend: a trained step reaches the engine, and
wrong flags do not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend, make_samples, save_tiny_qwen3, whole_batch

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "engines"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "plugins" / "embedded"))
from engine_drivers import finish, load, make
from every_family import FAMILIES, save_tiny
from safetensors.torch import load_file, save_file
from test_engine_families import saved

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.fsdp.hf_weights import (
    ModelFormat,
    iter_hf_weights,
    load_full_model,
    loading_dtype,
)
from slime.backends.fsdp.model import check_device
from slime.backends.train_loop import train_on_rollout
from slime.models.loading import ModelError
from slime.models.scorer import PolicyScorer


@pytest.mark.parametrize("family", ["gpt-oss", "Qwen3-Next"])
def test_trained_weights_reach_the_engine(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    backend = make_backend(make_args(folder, lr=1e-2, gradient_checkpointing=True))
    train_on_rollout(backend, whole_batch(make_samples(), micro_batch_size=8))
    scorer = backend.scorer
    assert isinstance(scorer, PolicyScorer)
    loaded = load(folder)
    loaded.engine.weights.load(
        (name, tensor.clone()) for name, tensor in iter_hf_weights(scorer.hf, torch.float32)
    )
    loaded.engine.runner.weights_changed()
    sequence = make(range(10, 40), max_new_tokens=9)
    finish(loaded, [sequence])
    with torch.no_grad():
        got = scorer(backend.builder.build([torch.tensor(sequence.tokens)], [9], [0], [None]))[
            0
        ].log_probs
    torch.testing.assert_close(got, torch.tensor(sequence.output_logprobs), rtol=0, atol=1e-4)


def test_layers_with_a_state_are_checked_where_their_kernels_run() -> None:
    """flash-linear-attention takes no tensors of the CPU. Other models need not fit on one GPU for
    the check.
    """
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [check_device(cuda, True), check_device(cuda, False), check_device(cpu, True)] == [
        cuda,
        cpu,
        cpu,
    ]


def test_sdpa_would_leave_out_soft_caps(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"SDPA.*--attn-implementation"):
        make_backend(make_args(save_tiny("Gemma 2", tmp_path), attn_implementation="sdpa"))


def test_an_indexer_keeps_its_weights(tmp_path: Path) -> None:
    """It gets no gradient, and no decay of weights either; all others are trained."""
    backend = make_backend(make_args(save_tiny("GLM-5", tmp_path), lr=1e-2, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    train_on_rollout(backend, whole_batch(make_samples(), micro_batch_size=8))
    kept = {name for name, tensor in backend.named_weights() if torch.equal(tensor, before[name])}
    assert kept == {
        name for name in before if ".indexer." in name or "e_score_correction_bias" in name
    }


def test_a_sample_that_would_change_the_rotary_frequencies_of_others(tmp_path: Path) -> None:
    """With longrope, a sample above the limit changes the log-probs of all others in its pack."""
    rope = dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[8.0] * 4
    )
    folder = saved(
        "Phi-3", tmp_path, head_dim=8, rope_parameters=rope, original_max_position_embeddings=16,
    )  # fmt: skip
    builder = make_backend(make_args(folder)).builder
    samples = [torch.arange(1, 11), torch.arange(1, 17), torch.arange(1, 18)]
    builder.build(samples[:2], [5, 5], [0, 1], [None] * 2)
    with pytest.raises(ModelError, match=r"has 17.*Above 16.*--rollout-max-context-len 16"):
        builder.build(samples[1:], [5, 5], [0, 1], [None] * 2)
    assert load(folder).context_len == 16


def test_the_value_head_of_a_critic_is_trained_although_no_checkpoint_has_it(
    tmp_path: Path,
) -> None:
    only = dict(only_train_params_name_list=[r"layers\.1\."], advantage_estimator="ppo")
    for role in ("critic", "actor"):
        backend = make_backend(make_args(save_tiny("Llama", tmp_path / role), **only), role)
        trained = [name for name, _ in backend.optimizer.named]
        assert {name for name in trained if "value_head" in name} == (
            {"value_head.weight", "value_head.bias"} if role == "critic" else set()
        )
        assert all("layers.1." in name or "value_head" in name for name in trained)


@pytest.mark.parametrize(
    ("flag", "pattern", "trained"),
    [
        ("only_train_params_name_list", r"^model\.layers\.1\.mlp", 3),
        ("freeze_params_name_list", r"^model\.(layers|embed)", 1),
        ("freeze_params_name_list", "lm_head", None),  # which a critic does not have
    ],
)
def test_a_critics_parameters_have_the_names_of_the_checkpoint(
    flag: str, pattern: str, trained: int | None, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {flag: [pattern], "advantage_estimator": "ppo"}
    folder = save_tiny_qwen3(tmp_path)
    actor, critic = (make_backend(make_args(folder, **flags), role) for role in ("actor", "critic"))
    mine = [name for name, _ in critic.optimizer.named if "value_head" not in name]
    assert mine == [
        name.replace("model.", "backbone.", 1)
        for name, _ in actor.optimizer.named
        if not name.startswith("lm_head")
    ]
    assert len(mine) == trained or trained is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loaded_in_bfloat16_is_the_one_that_is_cast(
    family: str, tmp_path: Path
) -> None:
    """The frozen base of an adapter is loaded in the dtype of the passes, unless this changes more
    than parameters.
    """
    how = ModelFormat(str(save_tiny(family, tmp_path)), None, None, trust=False)
    for file in tmp_path.glob("**/*.safetensors"):  # zeros and ones are the same in all dtypes
        values = load_file(file)
        changed = {
            name: x + 0.01 * torch.randn(x.shape)
            for name, x in values.items()
            if x.is_floating_point()
        }
        save_file(values | changed, file, metadata={"format": "pt"})
    dtype = loading_dtype(how.hf_checkpoint, how, torch.bfloat16)
    wide, narrow = (
        load_full_model(how.hf_checkpoint, how, dtype=kind) for kind in (torch.float32, dtype)
    )
    # the router of the second one has a bias that is a buffer
    if family in ("Llama", "MiniMax-M2"):
        assert dtype == (torch.bfloat16 if family == "Llama" else torch.float32)
    got, want = dict(narrow.named_parameters()), dict(wide.named_parameters())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name].bfloat16(), want[name].bfloat16()) for name in want)
    buffers = dict(narrow.named_buffers())
    for name, expected in wide.named_buffers():
        assert torch.equal(buffers[name], expected), name


def test_a_checkpoint_that_was_read_before_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_args(save_tiny("Qwen3-MoE", tmp_path))
    expected = dict(make_backend(args).named_weights())
    read = FsdpBackend.read_ahead(args)
    monkeypatch.delattr("slime.backends.fsdp.hf_weights.load_hf_model")
    given = dict(FsdpBackend(args, "actor", 0, 1, torch.device("cpu"), read).named_weights())
    assert given.keys() == expected.keys() and all(
        torch.equal(given[name], expected[name]) for name in given
    )
