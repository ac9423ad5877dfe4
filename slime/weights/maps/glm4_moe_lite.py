"""GLM-4.7-Flash: the attention of DeepSeek V3 and the experts of GLM-4.5."""

from __future__ import annotations

from slime.weights.maps import deepseek_v3
from slime.weights.maps.family import Family

FAMILY = Family("glm4_moe_lite", ("glm4_moe_lite",), deepseek_v3.settings, deepseek_v3.layer)
