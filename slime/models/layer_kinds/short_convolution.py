"""Short causal convolutions between two gates (LFM2)."""

from __future__ import annotations

from slime.models.layer_kinds.kind import with_state

KIND = with_state("short convolution", ("conv",), ("ShortConv",))
