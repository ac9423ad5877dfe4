"""Documented import paths only; the code behind them lives in the rooms."""
