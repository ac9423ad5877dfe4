"""Soft-capped attention scores (Gemma 2). transformers passes the cap to the attention as ``softcap``.

Packing, prompt sharing, context parallelism and engine: as the attention that has the cap, because it changes each
score alone. SDPA of transformers leaves the cap out without an error, so padded batches need ``--attn-implementation
eager``.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind

KIND = LayerKind("soft cap", lambda place: bool(getattr(place.config, "attn_logit_softcapping", None)))
