"""What may have gone wrong on one side, each as a change of the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.backends.fsdp.experts import Answers
from slime.models.fp8 import dequantize, quantize
from slime.models.fp8_format import BLOCK, Fp8Format, Granularity, fp8_layout
from slime.plugins.gap.reference import Reference, Setup, Weights, routers
from slime.plugins.tools.verify.check import guesses

Only = Callable[[str], bool]
"""Whether a tensor or a module takes part, by its name. The name of a module ends with a point."""
Change = Callable[[Setup, Only], Setup]
GRANULARITIES: tuple[Granularity, ...] = ("block", "channel", "tensor")
EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
THETAS = (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
LENGTHS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Factors by which positions are divided."""
CUTS = (0.7, 0.8, 0.9, 0.95, 0.99)
COUNTS = (10, 20, 40, 50, 100)
DTYPES = "--rollout-dtype float32 on the engine, --train-dtype float32 on the trainer"
NO_FLAG = "no flag: correct the model's code or its converter on that side (slime verify)"
SYNC = "a weight sync: --audit-weights, --check-weight-update-equal"


@dataclass(frozen=True)
class Cause:
    """A change of the reference.

    Attributes:
        text: What is wrong.
        flag: The flag that removes it.
        change: Changes a setup, limited to some tensors and modules.
        layered: Whether it can be limited.
        weights: The weights that it puts in the place of the others; None if it does not.
    """

    text: str
    flag: str
    change: Change
    layered: bool = True
    weights: Weights | None = None


def causes(reference: Reference, older: Mapping[str, Weights]) -> Iterator[Cause]:
    """Yield the causes that a run's own flags and events have; of causes that explain the same, the
    first is named.

    Args:
        older: Other weights that a side may have had, by what they are.
    """
    yield from _of_sampling(reference)
    yield from _of_numbers()
    yield from _of_experts(reference)
    for what, weights in older.items():
        if bool(reference.stale.any()):
            yield Cause(
                f"stale spans: tokens sampled with {what}",
                "--mask-offpolicy-in-partial-rollout, or --use-tis",
                _both(exchange(weights), _changed(stale_only=True)),
                False,
            )
        yield Cause(what, SYNC, exchange(weights), weights=weights)


def exchange(weights: Weights) -> Change:
    """Return a change that puts other weights in the place of those of a setup."""

    def change(setup: Setup, only: Only) -> Setup:
        pairs = setup.weights.items()
        return replace(setup, weights={n: weights.get(n, t) if only(n) else t for n, t in pairs})

    return change


def _both(one: Change, other: Change) -> Change:
    return lambda setup, only: other(one(setup, only), only)


def _changed(**fields: Any) -> Change:
    return lambda setup, _: replace(setup, **fields)


def _converted(convert: Callable[..., Weights], *values: object) -> Change:
    return lambda setup, only: exchange(convert(setup.weights, *values))(setup, only)


def _patched(patch: Callable[..., None], *values: object) -> Change:
    """Return a change of the model after its weights are loaded, ``patch(model, only, *values)``."""

    def change(setup: Setup, only: Only) -> Setup:
        return replace(setup, patches=(*setup.patches, lambda model: patch(model, only, *values)))

    return change


def _of_sampling(reference: Reference) -> Iterator[Cause]:
    plain = reference.plain.sampling
    for text, sampling in (
        ("log-probs at temperature 1", replace(plain, temperature=1.0)),
        ("log-probs of the whole distribution, not of its nucleus", replace(plain, whole=True)),
        *((f"nucleus cut at top-p {cut:g}", replace(plain, top_p=cut)) for cut in CUTS),
        *((f"nucleus cut at top-k {count}", replace(plain, top_k=count)) for count in COUNTS),
    ):
        if sampling != plain:
            flag = "--rollout-top-p 1 --rollout-top-k -1, or the embedded engine with FSDP"
            yield Cause(text, flag, _changed(sampling=sampling), False)


# --- dtypes ---------------------------------------------------------------------------------------


def _of_numbers() -> Iterator[Cause]:
    for scale in GRANULARITIES:
        yield Cause(
            f"fp8 weights, a scale for each {scale}",
            "no --rollout-quantization, or a finer --rollout-quantization-scale",
            _converted(_fp8, scale),
        )
    yield Cause(
        "fp8 weights and inputs of these layers, a scale for each block",
        "no --rollout-quantization: SGLang rounds both",
        _both(_converted(_fp8, "block"), _patched(_fp8_inputs)),
    )
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield Cause(f"head in {name}", DTYPES, _patched(_head, dtype), False)
        yield Cause(f"weights in {name}", DTYPES, _converted(_rounded, dtype))
        yield Cause(f"all in {name}", DTYPES, _changed(dtype=dtype), False)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        flag = "the engine's own option for the dtype of its KV cache (auto)"
        name = str(dtype).removeprefix("torch.")
        yield Cause(f"KV cache in {name}", flag, _patched(_kv, dtype))


def _rounded(weights: Weights, dtype: torch.dtype) -> Weights:
    return {name: tensor.to(dtype).float() for name, tensor in weights.items()}


def _fp8(weights: Weights, scale: Granularity) -> Weights:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    names = fp8_layout(shapes, Fp8Format(scale)).names
    return {name: dequantize(*quantize(weights[name], scale)) for name in names}


def _fp8_inputs(model: PreTrainedModel, only: Only) -> None:
    def rounded(_module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        rows = inputs[0].reshape(-1, BLOCK)  # a scale for each 128 values of a token
        return dequantize(*quantize(rows, "channel")).view_as(inputs[0]).to(inputs[0].dtype)

    named = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    shapes = {name: tuple(module.weight.shape) for name, module in named.items()}
    for name in fp8_layout(shapes, Fp8Format()).names:
        if shapes[name][1] % BLOCK == 0 and only(name):
            named[name].register_forward_pre_hook(rounded)


def _head(model: PreTrainedModel, _only: Only, dtype: torch.dtype) -> None:
    def head(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        assert isinstance(module.weight, Tensor)
        return nn.functional.linear(inputs[0].to(dtype), module.weight.to(dtype)).float()

    model.get_output_embeddings().register_forward_hook(head)


def _kv(model: PreTrainedModel, only: Only, dtype: torch.dtype) -> None:
    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")) and only(f"{name}."):
            module.register_forward_hook(lambda _m, _i, output: output.to(dtype).to(output.dtype))


# --- experts --------------------------------------------------------------------------------------


def _of_experts(reference: Reference) -> Iterator[Cause]:
    flag = "--use-rollout-routing-replay (with SGLang)"
    if any(one.routes is not None for one in reference.samples):
        text = "flipped routes: the engine's recorded experts are others"
        yield Cause(text, flag, _changed(routed=True), False)
    if routers(reference.like):
        yield Cause("flipped routes: the router computes in bfloat16", flag, _patched(_router))


def _router(model: PreTrainedModel, only: Only) -> None:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> object:
        logits, _, experts = output
        rounded = logits.bfloat16().float().topk(experts.shape[-1], -1).indices
        with Answers(rounded, logits.shape[-1]):
            return module.forward(*inputs)

    for name, module in routers(model).items():
        if only(f"{name}."):
            module.register_forward_hook(hook)


# --- config ---------------------------------------------------------------------------------------


def faults(reference: Reference) -> Iterator[Cause]:
    """Yield the causes that are mistakes in the code of a model, its config or its converter."""
    own = {value for _, _, _, value in _epsilons(reference.like)}
    for value in EPSILONS:
        if own and value not in own:
            text = f"norms with epsilon {value:g} instead of {', '.join(f'{v:g}' for v in own)}"
            yield Cause(text, NO_FLAG, _patched(_set_epsilon, value))
    for theta, length in [*((t, 1.0) for t in THETAS), *((0.0, factor) for factor in LENGTHS)]:
        text = (
            f"RoPE with theta {theta:g} and no scaling"
            if theta
            else f"RoPE of another length: positions divided by {length:g}"
        )
        yield Cause(text, NO_FLAG, _patched(_rotate, theta, length), False)

    plain = reference.plain.weights
    for guess in guesses(plain, list(plain)):
        yield Cause(guess.text, NO_FLAG, exchange(guess.weights), weights=guess.weights)


def _epsilons(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, float]]:
    for name, module in model.named_modules():
        for attribute in ("variance_epsilon", "eps"):
            value = vars(module).get(attribute)
            if isinstance(value, float):
                yield name, module, attribute, value


def _set_epsilon(model: PreTrainedModel, only: Only, value: float) -> None:
    for name, module, attribute, _ in list(_epsilons(model)):
        if only(f"{name}."):
            setattr(module, attribute, value)


def _rotate(model: PreTrainedModel, _only: Only, theta: float, length: float) -> None:
    for module in model.modules():
        frequencies = module._buffers.get("inv_freq")
        if frequencies is not None:
            if theta:
                steps = torch.arange(len(frequencies), device=frequencies.device)
                frequencies = theta ** -(steps / len(frequencies))
            module.register_buffer("inv_freq", frequencies / length, persistent=False)


# --- a part of the weights ------------------------------------------------------------------------


def layer_of(name: str) -> str:
    """Return the layer of a tensor or a module."""
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", name)
    return f"layer {found[1]}" if found else "outside of layers"


def fitted(name: str, value: Tensor) -> Cause:
    """Return the cause that one parameter of the model has another value."""

    def patch(model: PreTrainedModel, _only: Only) -> None:
        # Not in place: the model may share its memory with the weights of the setup.
        dict(model.named_parameters())[name].data = value

    return Cause(f"a wrong tensor: {name}", SYNC, _patched(patch), False)
