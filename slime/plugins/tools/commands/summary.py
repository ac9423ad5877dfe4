"""``slime summary``: print the final table of a run from its folder."""

from __future__ import annotations

import json
from pathlib import Path

from slime.cli.errors import CommandError, writing


def show_summary(path: Path, as_json: bool = False, png: Path | None = None) -> None:
    """Print the table, or the figures as JSON, and draw the reward curve if ``png`` is given.

    Raises:
        CommandError: The folder is not the folder of a run, or matplotlib is needed but not installed.
    """
    from rich.console import Console

    from slime.observability.metrics import MetricsError
    from slime.observability.run_dir import RunDir
    from slime.plugins.tools.summary.charts import reward_curve_png
    from slime.plugins.tools.summary.figures import print_summary, summarize

    run_dir = RunDir(path.resolve())
    try:
        summary = summarize(run_dir)
        if png is not None:
            with writing(f"--png {png}"):
                reward_curve_png(png, summary)
    except MetricsError as error:
        raise CommandError(str(error)) from error
    except ModuleNotFoundError as error:
        raise CommandError(f"--png needs {error.name}: run pip install 'slime-rl[plots]'") from error
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_summary(run_dir, summary, Console(highlight=False, markup=False))
