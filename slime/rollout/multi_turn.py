"""Documented import path; the code is in :mod:`slime.plugins.agents.conversation`."""

from slime.plugins.agents.conversation import Conversation, ModelTurn, ToolCall, tool_calls
from slime.rollout.group import TURNS

__all__ = ["TURNS", "Conversation", "ModelTurn", "ToolCall", "tool_calls"]
