"""Verification against plain transformers: what is right passes, and a planted error is named where
it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig
from transformers.models.llama import modeling_llama

from slime.plugins.tools import verify as verify_run
from slime.plugins.tools.local_ranks import Place
from slime.plugins.tools.verify import Target, engine_log_probs, table, verify
from slime.plugins.tools.verify.check import (
    check_gradients,
    check_log_probs,
    load_weights,
    parts_of,
    write_model,
)
from slime.plugins.tools.verify.reference import (
    RandomSample,
    Scores,
    VerifyJob,
    make_samples,
    reference_scores,
    verify_rank,
)
from slime.plugins.tools.verify.small import VerifyError, cut_down, make_small

BIG = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 12,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Only the config of a larger model: grouped-query heads, tied embeddings, a padding token."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        **BIG, num_key_value_heads=4, vocab_size=300, pad_token_id=290, tie_word_embeddings=True
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Let the only rank run in this process; returns a function that plants an error while it
    does.
    """
    plants: list[Callable[[], None]] = []

    def in_process(
        function: str, world_size: int, job: VerifyJob, folder: Path, **_: Any
    ) -> list[list[Scores]]:
        with pytest.MonkeyPatch.context() as patch:
            for plant in plants:
                plant(patch)  # type: ignore[call-arg]
            return [verify_rank(Place(0, 1, 0), job)]

    monkeypatch.setattr(verify_run, "run_ranks", in_process)
    yield plants.append
    if dist.is_initialized():
        dist.destroy_process_group()


def target(model: str, **changes: Any) -> Target:
    return Target(model, engine=None, layers=2, **changes)


def test_a_model_of_experts_is_right(here: Any, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **BIG, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64,
        mlp_only_layers=[0], vocab_size=300,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = verify(target(str(tmp_path)))
    assert found.good, found.checks
    assert "4 experts" in found.small.description and found.small.layers == 2
    assert [check.what for check in found.checks] == [
        "weights round trip", "log-probs", "loss", "gradients", "gradient norm",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "flags", "what"),
    [
        ("GptOssConfig", {}, "gpt_oss: 4 of 36 layers, hidden size 128, 16 heads, 2 key heads, 4 experts"),
        ("MiniMaxM2Config", {}, "minimax_m2: 4 of 62 layers, hidden size 96, 12 heads, 2 key heads, 4 experts"),
        ("DeepseekV3Config", {}, "deepseek_v3: 4 of 61 layers, hidden size 32, 2 heads, 2 key heads, 4 experts"),
        ("Gemma3Config", {},
            "gemma3_text, the language model of gemma3: 6 of 26 layers, hidden size 32, 4 heads, "
            "2 key heads, tied embeddings"),
        ("DeepseekV32Config", {"attn_implementation": "sdpa"}, "deepseek_v32: 4 of 61 layers, hidden size 32, "
         "2 heads, 2 key heads, 4 experts"),
        pytest.param("Qwen3NextConfig", {}, "qwen3_next: 4 of 48 layers, hidden size 128, 16 heads, 2 key heads, "
                     "4 experts", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=["gpt-oss", "minimax-m2", "deepseek-v3", "gemma-3", "deepseek-v3.2", "qwen3-next"],
)  # fmt: skip
def test_other_families_are_right(
    here: Any, tmp_path: Path, family: str, flags: dict[str, str], what: str
) -> None:
    """The configs are transformers' defaults, which are those of a published model of the
    family.
    """
    getattr(transformers, family)().save_pretrained(tmp_path)
    found = verify(Target(str(tmp_path), engine=None, flags=flags))
    assert found.good, found.checks
    assert found.small.description == what


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("DeepseekV32Config", {"index_topk": 6}),
        ("GlmMoeDsaConfig", {"index_topk": 6}),
        ("Llama4TextConfig", {"attention_chunk_size": 6, "floor_scale": 4}),
        ("MistralConfig", {"sliding_window": 6}),
    ],
)
def test_what_bounds_attention_is_cut_down_too(family: str, sizes: dict[str, int]) -> None:
    """Otherwise it would have no effect on samples of at most 19 tokens."""
    small = cut_down(getattr(transformers, family)(), 2)
    assert {name: getattr(small, name) for name in sizes} == sizes


@pytest.mark.parametrize("family", ["DeepseekV3Config", "MiniMaxM2Config"])
def test_the_bias_of_the_choice_of_experts_is_random(tmp_path: Path, family: str) -> None:
    """With zeros, a backend that neither reads nor uses it would be right."""
    getattr(transformers, family)().save_pretrained(tmp_path)
    make_small(str(tmp_path), tmp_path / "small", 2, 2)
    biases = [
        t
        for name, t in load_weights(tmp_path / "small").items()
        if name.endswith("e_score_correction_bias")
    ]
    assert biases and all(bias.ne(0).all() for bias in biases)


@pytest.mark.parametrize("family", ["LongcatFlashConfig", "DeepseekV2Config"])
def test_a_family_whose_sizes_are_not_known_is_an_error_of_one_line(
    here: Any, tmp_path: Path, family: str
) -> None:
    """The first cannot be cut down, and what the second is cut down to does not run in
    transformers.
    """
    getattr(transformers, family)().save_pretrained(tmp_path)
    with pytest.raises(VerifyError, match="small model") as error:
        verify(target(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_model_with_fewer_tokens_than_the_batch_is_verified(tmp_path: Path) -> None:
    LlamaConfig(**BIG, vocab_size=32, pad_token_id=31).save_pretrained(tmp_path)
    small = make_small(str(tmp_path), tmp_path / "small", 2, 2)
    assert reference_scores(small.folder, make_samples(), with_gradients=False).log_probs


def test_a_quantized_model_is_verified_without_its_quantization(tmp_path: Path) -> None:
    """Its weights are random and in float32; the package of its quantization need not be there."""
    LlamaConfig(**BIG, quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(
        tmp_path
    )
    small = make_small(str(tmp_path), tmp_path / "small", 2, 2)
    assert "quantization_config" not in json.loads((small.folder / "config.json").read_text())
    assert reference_scores(small.folder, make_samples(), with_gradients=False).log_probs


@pytest.mark.real
def test_a_model_with_code_of_its_own_is_verified(here: Any, tmp_path: Path) -> None:
    """Its variants, which find the wrong part, and its engine run this code too."""
    config = LlamaConfig(**BIG, vocab_size=300).to_dict()
    code = {
        "AutoConfig": "configuration_mine.Mine",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "mine", "auto_map": code})
    )
    (tmp_path / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n"
        "\n"
        "class Mine(LlamaConfig):\n"
        "    model_type = 'mine'\n"
    )
    (tmp_path / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_mine import Mine\n\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = Mine\n"
    )
    here(
        lambda patch: patch.setattr(modeling_llama.LlamaMLP, "forward", planted.swapped_gate_and_up)
    )
    found = verify(Target(str(tmp_path), layers=2, trust_remote_code=True))
    assert found.places == ["model.layers.0.mlp", "model.layers.1.mlp"], found.checks
    assert found.checks[-1].what == "log-probs of the embedded engine" and found.checks[-1].good, (
        found.checks
    )


@pytest.mark.parametrize(
    "damage",
    [{"num_attention_heads": 0, "num_key_value_heads": 0}, {"num_attention_heads": 1, "num_key_value_heads": 4},
     {"hidden_size": "wide"}, {"num_hidden_layers": 0}, {"num_hidden_layers": -1}],
    ids=str,
)  # fmt: skip
def test_a_config_that_no_model_has_is_an_error_that_names_it(
    damage: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **damage}))
    with pytest.raises(VerifyError, match=re.escape(str(tmp_path))):
        make_small(str(tmp_path), tmp_path / "small", 2, 2)


def test_swapped_projections_of_every_layer_are_named(here: Any, llama: str) -> None:
    here(
        lambda patch: patch.setattr(modeling_llama.LlamaMLP, "forward", planted.swapped_gate_and_up)
    )
    found = verify(target(llama))
    assert not found.good and found.checks[0].good, "the weights themselves are right"
    assert found.places == ["model.layers.0.mlp", "model.layers.1.mlp"]
    lines = "\n".join(table(target(llama), found))
    assert "wrong outputs: model.layers.0.mlp" in lines and ", gate_proj.weight" in lines
    assert lines.endswith("NOT verified")


@pytest.mark.long
def test_wrong_experts_whose_projections_are_one_tensor_are_named(
    here: Any, tmp_path: Path
) -> None:
    """The tensors of gpt-oss have names without an end such as .weight, and biases of their own."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    transformers.GptOssConfig(vocab_size=1000, pad_token_id=0).save_pretrained(tmp_path)
    original = modeling_gpt_oss.GptOssMLP.forward

    def halved(self: Any, x: torch.Tensor) -> Any:
        out, *others = original(self, x)
        return (out / 2, *others)

    here(lambda patch: patch.setattr(modeling_gpt_oss.GptOssMLP, "forward", halved))
    assert verify(target(str(tmp_path))).places == ["model.layers.0.mlp", "model.layers.1.mlp"]


@pytest.mark.parametrize(
    ("others", "norm", "part"),
    [
        (["self_attn.o_proj", "mlp.down_proj"], "post_attention_layernorm", "mlp"),
        (
            ["self_attn.o_proj", "block_sparse_moe.gate"],
            "post_attention_layernorm",
            "block_sparse_moe",
        ),
        (["linear_attn.out_proj", "mlp.down_proj"], "input_layernorm", "linear_attn"),
        (
            ["self_attn.o_proj", "mlp.down_proj", "post_feedforward_layernorm"],
            "post_attention_layernorm",
            "self_attn",
        ),
        (
            ["self_attn.o_proj", "mlp.down_proj", "post_mlp_layernorm"],
            "post_attention_layernorm",
            "mlp",
        ),
    ],
    ids=["llama", "mixtral", "qwen3-next", "gemma", "glm-4"],
)
def test_a_norm_belongs_to_the_part_that_it_surrounds(
    others: list[str], norm: str, part: str
) -> None:
    names = [f"model.layers.0.{name}.weight" for name in [*others, norm]]
    assert parts_of(["model.norm.weight", *names])[names[-1]] == f"model.layers.0.{part}"


def test_a_wrong_norm_of_one_layer_is_named(here: Any, llama: str) -> None:
    original = modeling_llama.LlamaDecoderLayer.__init__

    def init(self: Any, config: Any, layer_idx: int) -> None:
        original(self, config, layer_idx)
        if layer_idx == 1:
            norm = self.input_layernorm
            norm.forward = planted.norm_without_weight.__get__(norm)

    here(lambda patch: patch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", init))
    found = verify(target(llama))
    assert found.places == ["model.layers.1.self_attn"]


def test_a_wrong_export_names_the_first_tensor(here: Any, llama: str) -> None:
    from slime.backends.fsdp.backend import FsdpBackend

    original = FsdpBackend.named_weights

    def flipped(self: FsdpBackend) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in original(self):
            yield (
                name,
                tensor.flip(0) if name == "model.layers.1.self_attn.k_proj.weight" else tensor,
            )

    here(lambda patch: patch.setattr(FsdpBackend, "named_weights", flipped))
    found = verify(target(llama))
    assert (found.checks[0].good, found.checks[0].first) == (
        False,
        "model.layers.1.self_attn.k_proj.weight",
    )
    assert found.checks[1].good and not found.places


def wrong_weight(model: Path, samples: list[RandomSample]) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].flip(0)}, file, metadata={"format": "pt"})


def wrong_token(model: Path, samples: list[RandomSample]) -> None:
    samples[5]["tokens"][-1] ^= 1


@pytest.mark.real
@pytest.mark.parametrize(
    "plant", [None, wrong_weight, pytest.param(wrong_token, marks=pytest.mark.long)]
)
def test_an_engine_that_receives_something_else_is_named(
    here: Any, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    """A real engine gets a copy of the model and of the samples; what is wrong there is not blamed
    on the trainer.
    """

    def engine(
        model: Path, name: str, samples: list[RandomSample], logs: Path, trust: bool
    ) -> dict[int, torch.Tensor]:
        copy = Path(shutil.copytree(model, tmp_path / "copy"))
        received = [RandomSample(**{**sample, "tokens": [*sample["tokens"]]}) for sample in samples]
        if plant is not None:
            plant(copy, received)
        return engine_log_probs(copy, name, received, logs)

    monkeypatch.setattr(verify_run, "engine_log_probs", engine)
    found = verify(Target(llama, layers=2, engine="embedded"))
    *trainer, last = found.checks
    assert all(check.good for check in trainer) and not found.places, found.checks
    assert last.what == "log-probs of the embedded engine"
    assert last.good == found.good == (plant is None), last
    if plant is wrong_token:
        assert last.note.endswith("sample 5 on rank 0")
    if plant is not None:
        assert [*table(Target(llama), found)][-1] == "NOT verified"


@pytest.mark.real
@pytest.mark.slow
def test_a_missing_sum_over_ranks_is_named(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ranks, each with a replica of its own: forward is right and every gradient is
    wrong.
    """
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    replicas = target(
        llama, data=2, flags={"fsdp_shard_size": 1}, ranks_function="planted:without_all_reduce"
    )
    found = verify(replicas)
    by_name = {check.what: check for check in found.checks}
    assert by_name["log-probs"].good and by_name["loss"].good and not by_name["gradients"].good
    assert "data-parallel" in by_name["gradients"].note


CP2: dict[str, Any] = {"sizes": {"context_parallel_size": 2}}


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_that_divide_data_and_tokens_are_right(llama: str) -> None:
    found = verify(target(llama, **CP2, data=2))
    assert found.good and found.world_size == 4, found.checks


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.long
def test_a_missing_sum_over_context_parallel_ranks_is_named(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error begins at keys and values of the last layer, and spreads to everything before
    them.
    """
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    found = verify(target(llama, **CP2, ranks_function="planted:without_sum_over_context"))
    by_name = {check.what: check for check in found.checks}
    assert by_name["log-probs"].good and by_name["loss"].good and not by_name["gradients"].good
    note = by_name["gradients"].note
    assert "context-parallel" in note
    begin = note.partition("in the backward pass, ")[2].removesuffix(" differ first").split(", ")
    kinds = {name.removeprefix("model.layers.1.") for name in begin}
    assert {"self_attn.k_proj.weight", "self_attn.v_proj.weight"} <= kinds, note
    assert kinds <= {
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "input_layernorm.weight",
    }, note


def test_log_probs_that_are_no_numbers_differ_in_whichever_sample() -> None:
    right = {number: torch.zeros(2) for number in range(3)}
    for number in right:
        check = check_log_probs(
            right, [{**right, number: torch.tensor([0.0, torch.nan])}], "log-probs"
        )
        assert (check.good, check.note) == (False, f"the most in sample {number} on rank 0")


def test_the_begin_of_a_wrong_gradient_is_in_the_last_part() -> None:
    names = [
        "embed.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "lm_head.weight",
    ]
    right = Scores(gradients={name: torch.ones(4) for name in names}, grad_norm=4.0)
    wrong = Scores(
        gradients={name: torch.ones(4) * (2 if name in names[:3] else 1) for name in names}
    )
    check = check_gradients(right, [right, wrong])
    assert not check.good and check.first == "embed.weight"
    assert check.note.endswith("pass, model.layers.1.self_attn.k_proj.weight differ first")
    wrong.gradients = {
        name: torch.ones(4) * (2 if name == "lm_head.weight" else 1) for name in names
    }
    assert check_gradients(right, [wrong]).note.endswith("pass, lm_head.weight differ first")


def test_layouts_that_cannot_be_are_refused(llama: str) -> None:
    with pytest.raises(VerifyError, match=r"FSDP.*tensor_model_parallel_size"):
        verify(target(llama, sizes={"tensor_model_parallel_size": 2}))
    with pytest.raises(VerifyError, match="at most 4"):
        verify(target(llama, data=8))
    with pytest.raises(VerifyError, match=r"config\.json"):
        verify(target(str(Path(llama) / "missing")))
    assert AutoConfig.from_pretrained(llama).num_hidden_layers == 24


def test_folders_of_a_checkpoint_are_left_out(tmp_path: Path) -> None:
    like = tmp_path / "like"
    (like / "onnx").mkdir(parents=True)
    (like / "config.json").write_text("{}")
    write_model({"one": torch.ones(2)}, like, tmp_path / "other")
    assert {file.name for file in (tmp_path / "other").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
