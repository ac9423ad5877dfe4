"""Metrics, traces, dumps and what the user sees while a run goes on."""
