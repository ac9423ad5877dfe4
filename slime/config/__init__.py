"""Flags, their help and their checks. Imports nothing of slime and nothing heavy."""
