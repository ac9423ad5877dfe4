"""Quantize weights to 8-bit floats (E4M3), and write a checkpoint of such weights.

A value ``w`` is stored as ``round(w / scale)`` with ``scale = max |w| / 448`` over the block, row
or tensor, so that the largest value becomes the largest finite E4M3 number. Source: DeepSeek-V3's
``weight_dequant``, whose ``weight_scale_inv`` is this scale.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from slime.models.fp8_format import BLOCK, Fp8Format, Fp8Layout, Granularity, fp8_layout
from slime.models.quantized import scaled, without_quantization
from slime.models.shards import copy_side_files, read_headers, resolve_folder, side_files
from slime.models.stored import StoredWeights, write_tensors

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
_SMALLEST_SCALE = 1e-12
"""A block of zeros gets this scale; 0 would make its values NaN."""


@torch.no_grad()
def quantize(weight: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Quantize a matrix.

    Args:
        weight: ``[R, C]``, of any floating-point dtype, on any device.

    Returns:
        The values ``[R, C]`` as ``float8_e4m3fn``, and the scales in float32: ``[ceil(R / 128),
        ceil(C / 128)]`` for blocks, ``[R, 1]`` for channels, ``[1]`` for a tensor.
    """
    wide = weight.detach().float()
    if granularity != "block":
        axes = (0, 1) if granularity == "tensor" else (1,)
        scales = (wide.abs().amax(axes, keepdim=True) / LARGEST).clamp_min(_SMALLEST_SCALE)
        return _rounded(wide / scales), scales.flatten() if granularity == "tensor" else scales
    rows, columns = wide.shape
    padded = functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp_min(_SMALLEST_SCALE)
    values = _rounded(blocks / scales[:, None, :, None]).view(padded.shape)
    return values[:rows, :columns].contiguous(), scales


def _rounded(values: Tensor) -> Tensor:
    # The division may round to a value just above the largest one, which the cast would turn into
    # NaN.
    return values.clamp(-LARGEST, LARGEST).to(DTYPE)


@torch.no_grad()
def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weights in float32 that an engine computes with. The granularity follows from the
    shapes.

    Args:
        values: ``[R, C]``.
        scales: As :func:`quantize` returns them.

    Raises:
        ValueError: The shapes do not fit.
    """
    return scaled(values, scales, block_sizes(values.shape, scales.shape))


def block_sizes(shape: Sequence[int], scales: Sequence[int]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if all do.

    Args:
        shape: The shape of a matrix.
        scales: The shape of its scales.

    Raises:
        ValueError: The shapes do not fit.
    """
    rows, columns = shape
    if tuple(scales) in ((), (1,)):
        return None
    if tuple(scales) == (rows, 1):
        return 1, columns
    if tuple(scales) != (-(-rows // BLOCK), -(-columns // BLOCK)):
        raise ValueError(
            f"scales of shape {tuple(scales)} do not fit values of shape {(rows, columns)}"
        )
    return BLOCK, BLOCK


# --- a checkpoint for engines to start from ---


def fp8_folder(
    checkpoint: str, how: Fp8Format, dtype: str | None = None, cache: Path | None = None
) -> Path:
    """Return a folder with the quantized weights of a checkpoint, its tokenizer, and a config.json
    that says so.

    It is made once per node and kept in the user's cache folder, under a digest of the checkpoint's
    files.

    Args:
        checkpoint: A Hugging Face folder or hub id. Weights that are quantized already are
            dequantized first.
        dtype: The dtype of the weights that are not quantized, and of computations, for
            config.json; None for that of the checkpoint.
        cache: Where folders are kept. Default: ``$XDG_CACHE_HOME/slime/fp8`` or
            ``~/.cache/slime/fp8``.

    Raises:
        ModelError: The checkpoint cannot be read.
    """
    source = resolve_folder(checkpoint)
    cache = (
        cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / "fp8"
    )
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / _digest(source, how, dtype)
    with _locked(cache / f"{folder.name}.lock"):
        if not (folder / "config.json").is_file():
            aside = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
            aside.mkdir()
            write_fp8(source, aside, how, dtype)
            aside.rename(folder)
    return folder


def write_fp8(source: Path, folder: Path, how: Fp8Format, dtype: str | None = None) -> Fp8Layout:
    """Write the quantized weights of a checkpoint, and copies of its other files, to an existing
    folder.

    config.json is written last. Returns the layout.
    """
    stored = StoredWeights(source)
    layout = fp8_layout(stored.shapes(), how)

    def quantized() -> Iterator[tuple[str, Tensor]]:
        for name in stored.shapes():
            weight = stored.get(name)
            if name in layout.names and dtype is not None:
                # as a weight sync, which casts before it quantizes
                weight = weight.to(getattr(torch, dtype))
            yield from quantized_parts(name, weight, layout)

    write_tensors(quantized(), folder, writer=True)
    copy_side_files(source, folder)
    name_quantization(source / "config.json", folder / "config.json", layout, dtype)
    return layout


def name_quantization(
    source: Path, target: Path, layout: Fp8Layout, dtype: str | None = None
) -> None:
    """Write the config.json ``source`` to ``target``, with the quantization of ``layout`` and no
    other.

    Args:
        dtype: The ``dtype`` in config.json, to which readers dequantize; None for that of
            ``source``.
    """
    config = without_quantization(json.loads(source.read_text()))
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {
            "dtype": dtype
        }
    target.write_text(
        json.dumps({**config, "quantization_config": layout.quantization_config()}, indent=2) + "\n"
    )


def quantized_parts(name: str, tensor: Tensor, layout: Fp8Layout) -> list[tuple[str, Tensor]]:
    """Return what is stored or sent for one weight ``[out, in]``: its scales (float32) and then its
    values (E4M3, of the same shape), or the tensor as it is if it is not quantized."""
    if name not in layout.names:
        return [(name, tensor)]
    values, scales = quantize(tensor, layout.format.granularity)
    return [(f"{name}{layout.format.scale_ending}", scales), (name, values)]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(source: Path, how: Fp8Format, dtype: str | None) -> str:
    copied = {str(file) for file in side_files(source)}
    files = sorted(
        {header.file for header in read_headers(source).values()} | {"config.json"} | copied
    )
    stats = [(file, (source / file).stat()) for file in files]
    told = [
        str(source.resolve()),
        repr(how),
        dtype,
        [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats],
    ]
    digest = hashlib.sha256(json.dumps(told).encode())
    for code in (__file__, Path(__file__).with_name("fp8_format.py")):
        digest.update(Path(code).read_bytes())
    return digest.hexdigest()[:24]
