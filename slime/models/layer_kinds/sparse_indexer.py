"""Attention to the tokens that an indexer selects (DeepSeek V3.2, GLM-5).

The indexer of transformers scores all tokens of a row. So the attention runs on whole sequences, and the indexer's
scores need memory for ``index_n_heads`` values for each pair of tokens of a sequence. The indexer itself gets no
gradient in transformers, so it keeps its weights. Source: https://arxiv.org/abs/2512.02556.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import Place, whole_attention


def has_indexer(place: Place) -> bool:
    return place.type == "indexed_attention" or bool(place.modules("Indexer"))


KIND = whole_attention("sparse indexer", has_indexer, ("indexed_attention",), indexers=("Indexer",))
