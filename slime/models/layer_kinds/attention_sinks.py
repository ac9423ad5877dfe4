"""Attention sinks: the softmax of each head has one more key, with a learned score and the value 0 (gpt-oss).

transformers passes the scores to the attention as ``s_aux``. Packing, prompt sharing, context parallelism and engine:
as the attention that has the sinks, because a sink belongs to each query.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind

KIND = LayerKind("attention sinks", lambda place: any(hasattr(module, "sinks") for module in place.layer.modules()))
