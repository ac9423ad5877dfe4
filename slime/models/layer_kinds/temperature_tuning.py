"""Queries that are scaled by the index of their row, in layers without rotary positions (Llama 4).

Source: https://arxiv.org/abs/2501.19399. The index is the position only if the row is one sequence.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import Place, whole_attention


def is_tuned(place: Place) -> bool:
    modules = place.modules("Attention")
    return any(getattr(m, "attn_temperature_tuning", False) and not getattr(m, "use_rope", 0) for m in modules)


KIND = whole_attention("temperature tuning", is_tuned, ())
