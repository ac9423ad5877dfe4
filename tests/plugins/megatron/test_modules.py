"""The building blocks by themselves, in one process."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import make_args
from tiny_families import CONFIGS
from torch import Tensor

from slime.config.layout import ParallelLayout
from slime.plugins.megatron.config import NEUTRAL, merged_settings, transformer_config
from slime.plugins.megatron.core import MegatronError, prepare
from slime.plugins.megatron.maps.family import get_family, not_divided

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [8, 16])
def test_heads_turn_as_megatron_turns_them(interleaved: bool, size: int) -> None:
    prepare()
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from slime.plugins.megatron.modules import turn_heads

    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    angles = torch.randn(7, 1, size // 2)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    theirs = [
        _apply_rotary_pos_emb_bshd(x.unsqueeze(1), angles.unsqueeze(1), interleaved).squeeze(1)
        for x in (q, k)
    ]
    ours = turn_heads(q, k, angles.cos(), angles.sin(), interleaved)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_middle_of_an_mlp_is_made_again_and_not_kept() -> None:
    prepare()
    from slime.plugins.megatron.modules import swiglu, without_keeping

    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.data_ptr())
        return x

    def gradients(remade: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        x, up = torch.randn(5, 4, requires_grad=True), torch.randn(4, 12, requires_grad=True)
        down = torch.randn(6, 3, requires_grad=True)
        made: list[int] = []

        def middle(gate_up: Tensor) -> Tensor:
            inner = swiglu(gate_up)
            made.append(inner.data_ptr())
            return inner

        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            gate_up = x @ up
            project = lambda inner: inner @ down  # noqa: E731
            out = without_keeping(project, middle, gate_up) if remade else project(middle(gate_up))
        before = len(made)
        (out**2).sum().backward()
        assert (made[0] in kept) is not remade
        return [tensor.grad for tensor in (x, up, down) if tensor.grad is not None], len(
            made
        ) - before

    plain, none = gradients(remade=False)
    remade, once = gradients(remade=True)
    assert (none, once) == (0, 1)
    assert len(plain) == 3 and all(torch.equal(a, b) for a, b in zip(plain, remade, strict=True))


def test_what_gpt_oss_cannot_have_is_refused() -> None:
    """Another factor in its activation, and expert tensor parallelism, which megatron-core lacks
    for biases.
    """
    prepare()
    config, family = CONFIGS["gpt_oss"].to_dict(), get_family("gpt_oss")
    with pytest.raises(ValueError, match=r"swiglu_alpha 2\.0 .* use --train-backend fsdp"):
        family.settings({**config, "swiglu_alpha": 2.0})
    with pytest.raises(MegatronError, match="use --expert-tensor-parallel-size 1"):
        layout = ParallelLayout(world_size=2, tp=2, etp=2)
        transformer_config(make_args("model"), family.settings(config), layout, torch.device("cpu"))


def test_a_norm_over_all_heads_needs_a_key_head_for_each_rank() -> None:
    prepare()
    settings = get_family("minimax_m2").settings(CONFIGS["minimax_m2"].to_dict())
    args = make_args("model")
    assert (
        transformer_config(
            args, settings, ParallelLayout(2, tp=2), torch.device("cpu")
        ).num_query_groups
        == 2
    )
    with pytest.raises(MegatronError, match=r"--tensor-model-parallel-size 4: .* at most 2"):
        transformer_config(args, settings, ParallelLayout(4, tp=4), torch.device("cpu"))


def test_the_gate_of_shared_experts_is_not_read_before_it_is_there() -> None:
    prepare()
    config = CONFIGS["qwen3_next"].to_dict()
    shape = (
        NEUTRAL | get_family("qwen3_next").settings(config) | {"moe_shared_expert_overlap": True}
    )
    args = make_args("model")
    transformer_config(args, shape, ParallelLayout(), torch.device("cpu"))
    with pytest.raises(
        MegatronError, match=r"--moe-shared-expert-overlap and --overlap-param-gather"
    ):
        transformer_config(
            args, shape | {"overlap_param_gather": True}, ParallelLayout(), torch.device("cpu")
        )


def test_layers_that_more_ranks_than_heads_would_divide_are_refused() -> None:
    config = CONFIGS["qwen3_next"].to_dict()
    assert not_divided(config, ParallelLayout(4, tp=2, cp=2)) is None
    assert not_divided(CONFIGS["llama"].to_dict(), ParallelLayout(8, tp=8)) is None
    problem = not_divided(config, ParallelLayout(8, tp=4, cp=2))
    assert (
        problem is not None
        and "4 key heads" in problem
        and "4 · 2 must be a divisor of 4" in problem
    )


def test_the_flags_of_an_indexer_are_those_of_the_checkpoint() -> None:
    config, family = CONFIGS["deepseek_v32"], get_family("deepseek_v32")
    given = {"experimental_attention_variant": "dsa", "dsa_indexer_topk": 4}
    assert merged_settings(given, "folder", family, config)["dsa_indexer_n_heads"] == 32
    with pytest.raises(MegatronError, match="--dsa-indexer-topk 5, but"):
        merged_settings({"dsa_indexer_topk": 5}, "folder", family, config)
    with pytest.raises(MegatronError, match="nothing trains the indexer"):
        merged_settings({"dsa_indexer_loss_coeff": 0.1}, "folder", family, config)
    with pytest.raises(MegatronError, match="dsa, but config"):
        merged_settings(given, "folder", get_family("llama"), CONFIGS["llama"])


def test_a_stage_that_lacks_a_selection_is_refused() -> None:
    prepare()
    from slime.plugins.megatron.mixers import Indexers

    indexers = Indexers(CONFIGS["glm_moe_dsa"], CONFIGS["glm_moe_dsa"].indexer_types)
    indexers.require_stage(range(2, 4))
    with pytest.raises(MegatronError, match=r"layer 1, which has the selection of layer 0"):
        indexers.require_stage(range(1, 3))


def test_flags_add_no_window_to_a_model_without_one() -> None:
    config = CONFIGS["llama"]
    with pytest.raises(
        MegatronError, match=r"--window-size \[4, 0\], but config.json specifies None"
    ):
        merged_settings({"window_size": [4, 0]}, "folder", get_family("llama"), config)
