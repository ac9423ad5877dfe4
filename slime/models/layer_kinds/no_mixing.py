"""Layers that compute each token alone, where a model lists them as layers of their own (Nemotron-H)."""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind

TYPES = ("mlp", "moe", "dense", "sparse")
KIND = LayerKind("no mixing", lambda place: place.type in TYPES, TYPES)
