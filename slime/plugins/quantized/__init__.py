"""Readers of quantized checkpoints: FP8, compressed-tensors and MXFP4."""

from slime.registry import register


def parts() -> None:
    """Register the values of ``quant_method`` in config.json."""
    here = "slime.plugins.quantized.methods"
    for method in ("fp8", "fbgemm_fp8", "modelopt"):
        register("quantization", method, f"{here}:read_scaled")
    register("quantization", "compressed-tensors", f"{here}:read_compressed")
    register("quantization", "mxfp4", f"{here}:read_mxfp4")
