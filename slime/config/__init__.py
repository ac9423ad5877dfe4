"""Flags, their help and their checks. Imports nothing heavy, so that ``--help`` is fast."""
