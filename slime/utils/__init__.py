"""The import paths that users' plugins name; the code behind them lives in the rooms."""
