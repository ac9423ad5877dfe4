"""Lets PyPI's torchvision be imported beside a CPU build of torch: scripts/test_torchvision.sh puts
this on the path.

The wheels of PyPI are CUDA builds, whose compiled operators do not load there. Importing
torchvision then fails, as it registers what two of them do without data. This declares these two
(non-maximum suppression, for object detection), without an implementation. What processors of
images call are torch's own operators. A torchvision that was built for the CPU needs none of this:
``pip install torchvision --index-url https://download.pytorch.org/whl/cpu``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Operators:
    """A finder that finds nothing, and declares the operators when torchvision is first looked
    for.
    """

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _Operators())  # type: ignore[arg-type]
