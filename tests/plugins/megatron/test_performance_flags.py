"""Flags that change speed alone do not reach the configs of megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from slime.plugins.megatron.config import _fields_from
from slime.plugins.megatron.flags import PERFORMANCE


@dataclass
class Config:
    use_precision_aware_optimizer: bool = False
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: bool = False
    num_layers: int = 0


def test_performance_flags_are_left_out() -> None:
    given = {name: True for name in PERFORMANCE} | {"num_layers": 2}
    assert _fields_from(given, Config) == {"num_layers": 2}
