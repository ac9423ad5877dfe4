"""An engine whose layers have an adapter computes what transformers computes with merged
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_drivers import finish, load, make, reference_logprobs, result
from test_engine_families import saved
from transformers import AutoModelForCausalLM

from slime.models.cpu_kernels import CpuLinear
from slime.models.lora import LoraLinear, LoraSettings, lora_layers, merged
from slime.models.peft_files import (
    Factors,
    factor_names,
    peft_config,
    read_config,
    read_factors,
    write_adapter,
)
from slime.plugins.embedded import routes_openai
from slime.plugins.embedded.adapters import load_named, read_settings, set_layers
from slime.plugins.embedded.loading import Loaded
from slime.plugins.embedded.protocol import parse_generate
from slime.plugins.embedded.served import WeightError
from slime.plugins.http.server import BadRequest

SETTINGS = LoraSettings(rank=3, alpha=6.0)
NAMES = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]


def factors(loaded: Loaded, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    views = loaded.engine.weights.views
    names = [name for layer in NAMES for name in factor_names(layer)]
    return [(name, torch.randn(views[name].shape, generator=generator) * 0.2) for name in names]


def update(loaded: Loaded, tensors: list[tuple[str, torch.Tensor]], version: str) -> None:
    loaded.engine.change_weights(lambda: loaded.engine.weights.load(tensors), version)


def merged_model(
    folder: Path, tensors: list[tuple[str, torch.Tensor]], settings: LoraSettings
) -> Any:
    model, values = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        dict(tensors),
    )
    with torch.no_grad():
        for layer in NAMES:
            a, b = (values[name] for name in factor_names(layer))
            weight = model.get_submodule(layer).weight
            weight.copy_(merged(weight, a, b, settings.scale))
    return model


def sequences() -> list[Any]:
    return [
        make([7 + i, *range(20, 22 + 5 * i)], str(i), seed=i, max_new_tokens=3 + i)
        for i in range(6)
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_adapter_computes_as_merged_weights_do(tiny_llama: Path, deterministic: bool) -> None:
    loaded = load(tiny_llama, deterministic=deterministic)
    base, plain = (
        sequences(),
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval(),
    )
    finish(loaded, base)
    set_layers(loaded, SETTINGS, NAMES)
    for version, seed in (("0.1", 1), ("0.2", 2)):
        new = factors(loaded, seed)
        update(loaded, new, version)
        model = merged_model(tiny_llama, new, SETTINGS)
        for sequence in (done := sequences()):
            finish(loaded, [sequence])
            expected = reference_logprobs(model, sequence.tokens)[sequence.prompt_len - 1 :]
            torch.testing.assert_close(
                torch.tensor(sequence.output_logprobs), expected, rtol=0, atol=1e-4
            )
        assert [s.tokens for s in done] != [s.tokens for s in base]
        if deterministic:
            together = sequences()
            finish(loaded, together)
            assert [result(s) for s in together] == [result(s) for s in done]
    zeros = [(name, torch.zeros_like(tensor)) for name, tensor in new]
    update(loaded, zeros, "0.3")
    again = sequences()[0]
    finish(loaded, [again])
    expected = reference_logprobs(plain, again.tokens)[again.prompt_len - 1 :]
    torch.testing.assert_close(torch.tensor(again.output_logprobs), expected, rtol=0, atol=1e-4)


def test_layers_and_their_names(tiny_llama: Path) -> None:
    loaded = load(tiny_llama)
    weights, model = loaded.engine.weights, loaded.engine.runner.model
    before = weights.checksums()
    set_layers(loaded, SETTINGS, NAMES)
    added = {name for layer in NAMES for name in factor_names(layer)}
    assert set(weights.checksums()) == set(before) | added
    assert {name: value for name, value in weights.checksums().items() if name in before} == before
    update(loaded, factors(loaded), "0.1")
    held = weights.checksums()
    set_layers(loaded, SETTINGS, NAMES)  # the same layers
    assert weights.checksums() == held
    weights.load_folder(tiny_llama)  # the weights of a whole model
    assert all(not weights.views[name].any() for layer in NAMES for name in factor_names(layer)[1:])
    set_layers(loaded, LoraSettings(rank=2, alpha=1.0), NAMES[:1])
    assert set(weights.checksums()) == set(before) | set(factor_names(NAMES[0]))
    assert [
        name for name, module in model.named_modules() if isinstance(module, LoraLinear)
    ] == NAMES[:1]
    with pytest.raises(WeightError, match=r"'model\.norm'"):
        set_layers(loaded, SETTINGS, ["model.norm"])


def test_settings_are_those_of_peft() -> None:
    config = peft_config(LoraSettings(rank=8, alpha=16.0, rslora=True), NAMES, "base")
    settings, names = read_settings(config)
    assert (settings.scale, names) == (LoraSettings(8, 16.0, rslora=True).scale, NAMES)
    for changes in (
        {"r": 0},
        {"lora_alpha": 0},
        {"lora_alpha": "x"},
        {"target_modules": []},
        {"target_modules": "q"},
    ):
        with pytest.raises(BadRequest, match=next(iter(changes))):
            read_settings({**config, **changes})
    # as in PEFT's files
    for changes in ({"alpha_pattern": {"q_proj": 64}}, {"init_lora_weights": "pissa"}):
        with pytest.raises(BadRequest, match=f"{next(iter(changes))}"):
            read_settings({**config, **changes})


def stored(folder: Path, seed: int, layers: list[str], settings: LoraSettings, model: Any) -> Path:
    """An adapter in PEFT's files."""
    generator = torch.Generator().manual_seed(seed)
    linears = {name: model.get_submodule(name) for name in layers}
    shapes = {
        name: ((settings.rank, m.in_features), (m.out_features, settings.rank))
        for name, m in linears.items()
    }
    made = {
        name: Factors(*(torch.randn(shape, generator=generator) * 0.2 for shape in both))
        for name, both in shapes.items()
    }
    write_adapter(folder, peft_config(settings, layers, "base"), made)
    return folder


def with_adapter(model: Path, folder: Path | None) -> Any:
    """The reference: transformers with the factors merged into its weights."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if folder is not None:
        settings, _ = read_config(folder)
        with torch.no_grad():
            for layer, (a, b) in read_factors(folder, settings.rank).items():
                weight = made.get_submodule(layer).weight
                weight.copy_(merged(weight, a, b, settings.scale))
    return made


@pytest.mark.parametrize("deterministic", [False, True])
def test_requests_of_several_adapters_share_a_batch(
    tiny_llama: Path, tmp_path: Path, deterministic: bool
) -> None:
    """The engine's own, two named ones on other layers and with other ranks; equal prompts share no
    KV.
    """
    loaded = load(tiny_llama, deterministic=deterministic)
    named, model = loaded.engine.runner.adapters, loaded.engine.runner.model
    set_layers(loaded, SETTINGS, NAMES)
    own = factors(loaded, 1)
    update(loaded, own, "0.1")
    every = [
        name
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "layers" in name
    ]
    folders = {
        "wide": stored(tmp_path / "wide", 2, every, LoraSettings(5, 10.0, rslora=True), model),
        "narrow": stored(tmp_path / "narrow", 3, NAMES[1:3], LoraSettings(2, 4.0), model),
    }
    for name, folder in folders.items():
        settings = read_config(folder)[0]
        load_named(loaded, name, settings, read_factors(folder, settings.rank))
    references: dict[str | None, Any] = {
        name: with_adapter(tiny_llama, folder) for name, folder in folders.items()
    }
    references[None] = merged_model(tiny_llama, own, SETTINGS)
    prompt = [7, *range(20, 40)]
    together = []
    for turn in range(2):  # in the second turn, the prompts of the first are there to share
        for i, name in enumerate((None, "wide", "narrow", "wide")):
            sequence = make(prompt, f"{turn}-{i}", seed=i, max_new_tokens=6)
            sequence.request.lora_path, sequence.adapter_key = name, named.key(name)
            together.append(sequence)
        finish(loaded, together[4 * turn :])
    for sequence in together:
        scores = reference_logprobs(references[sequence.request.lora_path], sequence.tokens)
        expected = scores[sequence.prompt_len - 1 :]
        torch.testing.assert_close(
            torch.tensor(sequence.output_logprobs), expected, rtol=0, atol=1e-4
        )
    assert all(s.cached_tokens > 0 for s in together[4:])
    if deterministic:  # alone, each gives the same bits
        alone = make(prompt, "alone", seed=1, max_new_tokens=6)
        alone.request.lora_path, alone.adapter_key = "wide", named.key("wide")
        finish(loaded, [alone])
        assert result(alone) == result(together[1])
    named.unload("wide")
    named.unload("narrow")
    assert not named.hooks
    finish(loaded, [last := make(prompt, "last", max_new_tokens=6)])
    expected = reference_logprobs(references[None], last.tokens)[last.prompt_len - 1 :]
    torch.testing.assert_close(torch.tensor(last.output_logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "part"), [("Qwen3.5", ".linear_attn."), ("DeepSeek V3.2", ".indexer.w")]
)
def test_modules_that_compute_some_rows_at_a_time_have_adapters_too(
    family: str, part: str, tmp_path: Path
) -> None:
    """A gated delta net computes the rows of each slot, and an indexer those of each group."""
    loaded = load(saved(family, tmp_path / "model"))
    loaded.engine.scheduler.prefill_tokens = 25
    named, model = loaded.engine.runner.adapters, loaded.engine.runner.model
    layers = [
        name
        for name, m in model.named_modules()
        if type(m) in (torch.nn.Linear, CpuLinear) and part in name
    ]
    names = (None, "a")
    folders = {
        name: stored(tmp_path / str(name), seed, layers, SETTINGS, model)
        for seed, name in enumerate(names)
    }
    made = {name: read_factors(folder, SETTINGS.rank) for name, folder in folders.items()}
    set_layers(loaded, SETTINGS, layers)
    pairs = [
        pair
        for layer in layers
        for pair in zip(factor_names(layer), made[None][layer], strict=True)
    ]
    update(loaded, pairs, "1")
    load_named(loaded, "a", SETTINGS, made["a"])
    together = []
    for i, name in enumerate((None, "a", None, "a")):
        together.append(make([7, *range(20, 40)], str(i), seed=i, max_new_tokens=6))
        together[-1].request.lora_path, together[-1].adapter_key = name, named.key(name)
    finish(loaded, together)
    references = {
        name: with_adapter(tmp_path / "model", folder) for name, folder in folders.items()
    }
    for sequence in together:
        scores = reference_logprobs(references[sequence.request.lora_path], sequence.tokens)
        expected = scores[sequence.prompt_len - 1 :]
        torch.testing.assert_close(
            torch.tensor(sequence.output_logprobs), expected, rtol=0, atol=1e-4
        )


def test_named_adapters_that_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    loaded = load(tiny_llama)
    named, model = loaded.engine.runner.adapters, loaded.engine.runner.model
    folder = stored(tmp_path, 1, NAMES, SETTINGS, model)
    made = read_factors(folder, SETTINGS.rank)
    named.load("mine", SETTINGS, made)
    first = named.key("mine")
    with pytest.raises(WeightError, match=r"'mine'.*loaded"):
        named.load("mine", SETTINGS, made)
    with pytest.raises(WeightError, match=r"'model\.norm'"):
        named.load("other", SETTINGS, {"model.norm": made[NAMES[0]]})
    with pytest.raises(WeightError, match=r"'other'.*shapes"):
        named.load("other", LoraSettings(4, 6.0), made)
    with pytest.raises(BadRequest, match=r"'other'.*loaded.*mine"):
        named.key("other")
    with pytest.raises(WeightError, match=r"'other'.*exist"):
        named.unload("other")
    named.unload("mine")
    named.load("mine", SETTINGS, made)
    assert named.key("mine") != first  # KV of the old one is not shared with the new one


def test_openai_requests_choose_an_adapter_too() -> None:
    """With SGLang's field; without it, the answer would be that of another adapter."""
    for body, adapter in (
        ({"prompt": [1, 2], "lora_path": "mine"}, "mine"),
        ({"prompt": [1, 2]}, None),
    ):
        native = {**routes_openai.native_body(body, 100, 8), "input_ids": [1, 2]}
        (request,) = parse_generate(native, 100).requests
        assert request.lora_path == adapter


def test_a_layer_that_gets_an_adapter_again_applies_it_to_all_rows(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The last forward before the layer lost its adapter may have been one of a request with a
    named adapter.
    """
    loaded = load(tiny_llama)
    named, model = loaded.engine.runner.adapters, loaded.engine.runner.model
    folder = stored(tmp_path, 1, NAMES, SETTINGS, model)
    named.load("mine", SETTINGS, read_factors(folder, SETTINGS.rank))
    set_layers(loaded, SETTINGS, NAMES[:2])
    named.select([named.key("mine"), 0], torch.device("cpu"))
    set_layers(loaded, SETTINGS, NAMES[2:3])
    named.select([], torch.device("cpu"))
    set_layers(loaded, SETTINGS, NAMES[:2])
    assert all(layer.lora_rows is None for layer in lora_layers(model).values())
