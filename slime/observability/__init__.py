"""Metrics, traces, debug data, and the terminal output of a run."""
