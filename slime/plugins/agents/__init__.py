"""Black-box agents: unmodified programs that call the model through an OpenAI or Anthropic endpoint.

:mod:`rollout` runs the program for a sample, :mod:`server` is the endpoint that it calls, :mod:`session` generates
its turns with the engines, and :mod:`trajectory` stores the turns as a tree and converts its leaves to samples.
"""
