"""Import megatron-core, with what release 0.16 needs where Transformer Engine is absent."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import warnings

SUPPORTED = ("0.16",)


class MegatronError(RuntimeError):
    """megatron-core is absent, or cannot do what the flags ask for; says what to change."""


@functools.cache
def prepare() -> str:
    """Check and import megatron-core once per process; returns its version.

    Raises:
        MegatronError: a package is missing, or the release is not one that was tested.
    """
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise MegatronError(
            "--train-backend megatron needs megatron-core: pip install 'slime[megatron]', or use --train-backend fsdp"
        ) from None
    if not version.startswith(SUPPORTED):
        raise MegatronError(f"megatron-core {version} is installed; tested are {', '.join(SUPPORTED)}.x: install one")
    if importlib.util.find_spec("psutil") is None:
        # Undeclared by megatron-core; without it dist_checkpointing.save waits for ever.
        raise MegatronError("megatron-core writes checkpoints with psutil, which is missing: pip install psutil")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine, Apex and the like, which are absent on purpose
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # it takes a stand-in for Transformer Engine
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a name that the router's gating looks up
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    return version


def require_cuda() -> None:
    """Raise MegatronError where torch has no CUDA device: megatron-core asks for its device, streams and generators."""
    import torch

    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        raise MegatronError("--train-backend megatron needs a CUDA GPU: use --train-backend fsdp here") from None
