"""Import megatron-core, with the changes that release 0.16 needs without Transformer Engine."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from pathlib import Path

from slime.config.machine import version_of
from slime.plugins.megatron.flags import installed_core, prefer_installed_core

SUPPORTED = "0.16."


class MegatronError(RuntimeError):
    """megatron-core is absent or does not support the flags. The message says what to change."""


@functools.cache
def prepare() -> str:
    """Check and import megatron-core, once per process, and return its version.

    Raises:
        MegatronError: A package is missing, the release was not tested, or the imported
            ``megatron.core`` is not the installed one.
    """
    # Only releases that were tested: the layers of slime replace parts of megatron-core by name.
    version = version_of("megatron-core")
    if version is None:
        raise MegatronError(
            "--train-backend megatron needs megatron-core: pip install 'slime-rl[megatron]', or "
            "use --train-backend fsdp"
        )
    if not version.startswith(SUPPORTED):
        raise MegatronError(
            f"megatron-core {version} is installed: install {SUPPORTED}x, which is tested"
        )
    # Its layers rely on kernels that start in the order of their launch. CUDA reads this when it is
    # initialized.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # A checkout of Megatron-LM on PYTHONPATH must not hide the installed package.
    prefer_installed_core()
    with warnings.catch_warnings():
        # warnings about Transformer Engine, Apex and so on, which are not needed
        warnings.simplefilter("ignore")
        import megatron.core

        _require_installed(version, megatron.core.__version__, Path(megatron.core.__file__))
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # it takes a stand-in for Transformer Engine
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a name that the router's gating looks up
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    return version


def _require_installed(version: str, imported: str, file: Path) -> None:
    """Raise MegatronError unless ``megatron.core`` in ``file`` belongs to the installed
    distribution.
    """
    root = installed_core()
    if imported != version or (root is not None and not file.resolve().is_relative_to(root)):
        raise MegatronError(
            f"megatron.core {imported} was imported from {file.parent}, but megatron-core "
            f"{version} is installed{f' in {root}' if root else ''}, and only that one is tested: "
            "remove the other from PYTHONPATH, and do not import it before slime's Megatron "
            "backend starts"
        )


def require_cuda() -> None:
    """Raise MegatronError where torch has no CUDA device: megatron-core asks for its device,
    streams and generators.
    """
    import torch

    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        raise MegatronError(
            "--train-backend megatron needs a CUDA GPU: use --train-backend fsdp here"
        ) from None
