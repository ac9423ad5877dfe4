"""The program that runs one command of a :class:`slime.plugins.agents.box.LocalBox` inside the
sandbox.

The file descriptor ``source`` holds one line of JSON (the order) and then a tar of the box's files;
the line of the results and the tar of the files afterwards go to ``target``. It runs in a fresh
sandbox, and ends every process of the command before it reads a file: nothing that a command left
behind can change what comes after it. Only the standard library is used.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from typing import IO


def main(source: int, target: int) -> None:
    """Run the order of ``source``, and write its results to ``target``."""
    with os.fdopen(source, "rb") as before:
        order = json.loads(before.readline())
        if before.peek(1):
            with tarfile.open(fileobj=before, mode="r|") as kept:
                kept.extractall("/", filter="fully_trusted")
    for path, text in order["put"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(text))
        os.chmod(path, 0o755)
    # Files without a name hold the output: no command can fill a pipe, or change what it has said.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            ["/bin/bash", "-c", order["command"]],
            cwd=order["folder"], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            env=os.environ | order["environment"],
        )  # fmt: skip
        late = False
        try:
            process.wait(order["seconds"])
        except subprocess.TimeoutExpired:
            late = True
        # All processes of this sandbox but this one, and the one that waits for its end.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        process.wait()
        result = {
            "exit_code": process.returncode,
            "status": "timeout" if late else _status(process.returncode),
            "stdout": _beginning(stdout, order["output_bytes"]),
            "stderr": _beginning(stderr, order["output_bytes"]),
            "files": {path: _content(path) for path in order["get"]},
        }
    try:
        with os.fdopen(target, "wb") as after:
            after.write(json.dumps(result).encode() + b"\n")
            with tarfile.open(fileobj=after, mode="w|") as keeping:
                for folder in order["kept"]:
                    keeping.add(folder)
    except OSError as error:  # too large, or a folder that cannot be read
        why = f"the files could not be kept ({error}): they are as before this command"
        print(why, file=sys.stderr)
        sys.exit(1)


def _status(code: int) -> str:
    return "ok" if code == 0 else "killed" if code < 0 or code > 128 else "error"


def _beginning(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")


def _content(path: str) -> str | None:
    """Return the content of a plain file in base64; None if there is none."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return base64.b64encode(file.read()).decode()
    except OSError:
        return None
