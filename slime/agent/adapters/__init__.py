"""Documented import path of the endpoints that a generate function owns."""

from slime.plugins.agents.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter"]
