"""``slime doctor [RUN]``: say why a run hung, died, slowed down or stopped learning."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from slime.cli.errors import CommandError


def doctor(folder: Path, as_json: bool = False, outside: bool = False) -> int:
    """Print the diagnosis of a run.

    Args:
        outside: Whether logs outside of the folder are read, to which a link or ``NCCL_DEBUG_FILE`` leads.

    Returns:
        1 if something is wrong, otherwise 0; hints do not count.

    Raises:
        CommandError: The folder is not that of a run.
    """
    from slime.observability.regular import shown
    from slime.plugins.tools.doctor.facts import NoRun, read_facts
    from slime.plugins.tools.doctor.report import diagnose, page

    try:
        facts = read_facts(folder.resolve(), with_stacks=True, outside=outside)
    except NoRun as error:
        raise CommandError(str(error)) from error
    findings = diagnose(facts)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for line in page(facts, findings):
            print(shown(line))
    return int(any(not finding.hint for finding in findings))
