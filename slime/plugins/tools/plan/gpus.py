"""What a GPU of each kind can do, from the makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class GpuKind:
    """One GPU and the links of its node.

    Attributes:
        memory: Bytes that CUDA reports as the device's whole memory.
        flops: Dense bf16 FLOP/s of the data sheet.
        bandwidth: Bytes/s of the device memory.
        link: Bytes/s in one direction between two GPUs of a node.
        network: Bytes/s in one direction of a GPU's share of the node's network.
        source: Where the figures come from.
        measured: Whether slime was measured on it. All other figures of it are extrapolated by its data sheet.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    source: str
    measured: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("h200", 139.8 * GIB, 989e12, 4.8e12, 450e9, 50e9, "NVIDIA H200 data sheet, SXM", measured=True),
        GpuKind("h100", 79.1 * GIB, 989e12, 3.35e12, 450e9, 50e9, "NVIDIA H100 data sheet, SXM5"),
        GpuKind("h20", 95.1 * GIB, 148e12, 4.0e12, 450e9, 50e9, "NVIDIA H20 data sheet"),
        GpuKind("a100", 79.2 * GIB, 312e12, 2.04e12, 300e9, 25e9, "NVIDIA A100 80 GB data sheet, SXM4"),
        GpuKind("a100-40gb", 39.4 * GIB, 312e12, 1.56e12, 300e9, 25e9, "NVIDIA A100 40 GB data sheet, SXM4"),
        GpuKind("b200", 178.4 * GIB, 2250e12, 7.7e12, 900e9, 50e9, "NVIDIA DGX B200 data sheet, per GPU"),
        GpuKind("l40s", 44.4 * GIB, 362e12, 0.86e12, 32e9, 12.5e9, "NVIDIA L40S data sheet, PCIe 4 without NVLink"),
    )
}
"""By the name of ``slime plan --kind``."""
