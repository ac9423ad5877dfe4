"""Mistral 7B, Nemo and Small (text): Llama's architecture, in the first ones with a sliding window in every layer."""

from __future__ import annotations

from slime.weights.maps.family import Family, decoder_layer, dense_settings

FAMILY = Family("mistral", ("mistral",), dense_settings, decoder_layer)
