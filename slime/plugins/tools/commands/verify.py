"""``slime verify MODEL``: compare a backend, a layout and an engine with plain transformers on one rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError

if TYPE_CHECKING:
    from slime.plugins.tools.verify.run import Target, Verified


def verify_model(target: Target, as_json: bool = False) -> int:
    """Verify a model and print the table.

    Returns:
        0 if everything is within the tolerances, otherwise 1.

    Raises:
        CommandError: The model or the layout cannot be verified, or a rank failed.
    """
    from transformers.utils import logging as transformers_logging

    from slime.engines.process import ServerFailed
    from slime.plugins.tools.local_ranks import RankError
    from slime.plugins.tools.verify.run import verify
    from slime.plugins.tools.verify.small import VerifyError

    transformers_logging.disable_progress_bar()
    try:
        result = verify(target)
    except (VerifyError, RankError, ServerFailed) as error:
        raise CommandError(str(error)) from error
    if as_json:
        facts = asdict(result) | {"good": result.good}
        for check in facts["checks"]:
            if not math.isfinite(check["largest"]):  # JSON has no infinity
                check["largest"] = None
        print(json.dumps(facts, indent=2, default=str, allow_nan=False))
    else:
        for line in table(target, result):
            print(line)
    return int(not result.good)


def table(target: Target, result: Verified) -> Iterator[str]:
    """Yield the lines of the table."""
    sizes = {name.removesuffix("_parallel_size"): size for name, size in target.sizes.items() if size}
    layout = ", ".join(f"{name} {size}" for name, size in [*sizes.items(), ("data", target.data)])
    yield f"model: {result.small.description}"
    yield f"{target.backend} on {result.world_size} rank{'s' * (result.world_size > 1)} ({layout}) in float32"
    yield f"{'check':<34}{'difference':>12}{'allowed':>12}"
    for check in result.checks:
        row = f"{check.what:<34}{check.largest:>12.2g}{check.allowed:>12.2g}  {'ok' if check.good else 'DIFFERS'}"
        yield row + "".join(f"; {text}" for text in (check.first, check.note) if text)
    if result.places:
        yield f"wrong outputs: {', '.join(result.places)}"
        inside = sorted({name.removeprefix(f"{result.places[0]}.") for name in result.parameters})
        yield f"parameters of the first: {', '.join(inside[:12])}{', ...' if len(inside) > 12 else ''}"
    if result.guess:
        yield f"its outputs are {result.guess}"
    yield "verified" if result.good else "NOT verified"
