"""Black-box agents: programs that speak to an OpenAI or Anthropic endpoint, trained as they are.

:mod:`rollout` runs the program of a sample, :mod:`server` is the endpoint that it talks to, :mod:`session` generates
its turns with the engines, :mod:`trajectory` keeps them as a tree and makes samples of its leaves.
"""
