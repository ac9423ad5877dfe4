"""What runs inside the sandbox: bash with recorders in place of the programs that would do something.

:mod:`slime.plugins.compat.recorder` hands the text of this file to the sandbox. It uses only the
standard library, and prints what was recorded as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TypedDict

BIN = Path("/tmp/recorders")
LOG = Path("/tmp/recorded")
REMARKS = Path("/tmp/remarks")
FARM = "/tmp/at"
"""Folders like those of the script, with links to their files: what a command writes there, such as
its log, goes nowhere else. A path below it stands for the same path without it.
"""
_UNANSWERED = " has no answer here: look at what the script derives from it"
_MOST_ENTRIES = 400
_DEEPEST = 2

# A recorder writes its words, each ended by NUL, and their number first. What would be run by
# another bash, on a node or in a container, is run here. scripts/env.sh of slime makes no environment
# here: its python is a recorder too, whose answer is the words that would give the real one.
RECORDER = r"""#!BASH
name="${0##*/}"
case "$name" in
    bash|sh) exec BASH "$@" ;;
    python|python3)
        case "${1:--}" in -c|-) exec PYTHON "$@" ;; esac
        [[ "${2:-}" == */env_setup.py ]] && echo slime-python && exit 0 ;;
esac
printf '%s\0' "$(($# + 1))" "$name" "$@" >> LOG
case "$name" in
    python|python3|slime|trl|rl) exit 0 ;;
    slime-python) printf '$(python'; printf ' %q' "$@"; printf ')\n'; exit 0 ;;
esac
words=("$@")
for ((i = 0; i < $#; i++)); do
    case "${words[i]}" in
        bash|sh|*/bash|*/sh) bash "${words[@]:i+1}"; exit 0 ;;
        *.sh|*.slurm|*.sbatch) [[ -f "${words[i]}" ]] && bash "${words[@]:i}"; exit 0 ;;
    esac
done
case "$name" in ssh|pdsh) [[ "${!#}" == *" "* ]] && bash -c "${!#}" ;; esac
exit 0
"""
# What cannot be made where it belongs is made below FARM.
MKDIR = r"""#!BASH
/usr/bin/mkdir "$@" 2>/dev/null && exit 0
for word in "$@"; do [[ "$word" == /* ]] && /usr/bin/mkdir -p "FARM$word" 2>/dev/null; done
exit 0
"""
# For a second try: of a folder or a file that is not here, the script is told nothing, but the reader
# is. The files of models are then those of this checkout. Not for the first try, because what a file
# declares within a function ends with it.
FUNCTIONS = r"""
cd() {
    [[ "${1:-}" == /* ]] && builtin cd "FARM$1" 2>/dev/null && return 0
    builtin cd "$@" 2>/dev/null && return 0
    printf '%s\n' "cd $*: there is no such folder here, and the script went on without it" >> REMARKS; }
source() {
    local file="$1"
    if [[ ! -r "$file" ]]; then
        local own="MODELS/${file##*/}"
        if [[ "$file" != *.sh || ! -r "$own" ]]; then
            printf '%s\n' "$file is not here, so what it sets is missing" >> REMARKS
            return 0
        fi
        printf '%s\n' "$file is not here: $own was read instead" >> REMARKS
        file="$own"
    fi
    builtin source "$file" "${@:2}"
}
.() { source "$@"; }
"""


class Order(TypedDict):
    """What is to be run, as :mod:`slime.plugins.compat.recorder` says it.

    ``folders`` are those of the script, ``starters`` the programs that are recorded, ``quiet`` those that do nothing,
    ``asked`` those of whose missing answer the reader is told.
    """

    bash: str
    python: str
    script: str
    text: str
    arguments: list[str]
    cwd: str
    folders: list[str]
    environment: dict[str, str]
    starters: list[str]
    quiet: list[str]
    asked: list[str]
    seconds: float
    models: str


def main(order: Order) -> None:
    """Run the script, and print the recorded commands, what was missing, and why bash failed."""
    places = {
        "BASH": order["bash"], "PYTHON": order["python"], "LOG": str(LOG), "REMARKS": str(REMARKS),
        "MODELS": order["models"], "FARM": FARM,
    }  # fmt: skip
    BIN.mkdir()
    for name in order["quiet"]:
        program(name, "#!BASH\nexit 0\n", places)
    for name in order["starters"]:
        program(name, RECORDER, places)
    program("hostname", "#!BASH\necho 127.0.0.1\n", places)
    for name in order["asked"]:
        program(name, f"#!BASH\necho '{name}{_UNANSWERED}' >> REMARKS\n", places)
    program("mkdir", MKDIR, places)
    program("tee", "#!BASH\nexec cat\n", places)
    for folder in order["folders"]:
        try:
            plant(Path(folder))
        except OSError:  # it cannot be read, or there are too many
            continue
    REMARKS.touch()
    Path(FARM + order["cwd"]).mkdir(parents=True, exist_ok=True)
    script = Path(FARM + order["script"])
    script.parent.mkdir(parents=True, exist_ok=True)
    script.unlink(missing_ok=True)  # the link to it
    script.write_text(order["text"], encoding="utf-8")
    # Beside the script, because for a file that its function reads it stands in BASH_SOURCE.
    prelude = script.with_name(f".{script.name}")
    prelude.write_text(filled(FUNCTIONS, places))
    failure, complete = run(order, {})
    if not complete:
        script.write_text(forgiven(order["text"]), encoding="utf-8")
        failure, _ = run(order, {"BASH_ENV": str(prelude)})
    remarks = REMARKS.read_text(errors="replace").splitlines()
    answer = {
        "commands": commands(LOG.read_text(errors="replace")),
        "remarks": list(dict.fromkeys(remarks)),
        "failure": failure,
    }
    print(json.dumps(answer).replace(FARM, "").replace("slime-python", "python"))


def plant(folder: Path, left: int = _DEEPEST) -> None:
    """Make a folder that can be written to below :data:`FARM`, with links to what is in ``folder``;
    of its folders as many as ``left`` says are made in the same way, one in the other.
    """
    here = Path(f"{FARM}{folder}")
    here.mkdir(parents=True, exist_ok=True)
    for entry in sorted(folder.iterdir())[:_MOST_ENTRIES]:
        link = here / entry.name
        if left and entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            plant(entry, left - 1)
        elif not link.exists():
            link.symlink_to(entry)


def program(name: str, text: str, places: dict[str, str]) -> None:
    path = BIN / name
    path.write_text(filled(text, places))
    path.chmod(0o755)


def filled(text: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def run(order: Order, more: dict[str, str]) -> tuple[str, bool]:
    """Run bash, and return why it did not reach the end of the script (empty if it did), and whether
    it missed nothing. A script may also wait for ever for what it could not write.
    """
    LOG.write_text("")
    environment = {
        **order["environment"],
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        **more,
    }
    process = subprocess.Popen(
        [order["bash"], FARM + order["script"], *order["arguments"]],
        cwd=FARM + order["cwd"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        error = process.communicate(timeout=order["seconds"])[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"bash did not end within {order['seconds']:g} s", False
    await_others(process.pid)
    lines = [line for line in error.splitlines() if not line.startswith("+")]  # not those of set -x
    failure = (
        f"bash ended with status {process.returncode}: {' / '.join(lines[-2:])}"
        if process.returncode
        else ""
    )
    return failure, not failure and "No such file or directory" not in error


def await_others(group: int) -> None:
    """Wait for what the script started in the background."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def forgiven(script: str) -> str:
    """Send what a script writes to places outside of its folders to nowhere, since bash does not
    start a command whose output cannot be written.
    """
    target = r'(&?>>?)[ \t]*(?:"[/$][^"\n]*"|(?:/(?!dev/)|\$)[^\s;|&)]*)'
    return re.sub(target, r"\1 /dev/null", script)


def commands(log: str) -> list[list[str]]:
    """Divide what the recorders wrote into the words of each command."""
    parts = log.split("\0")[:-1]
    found = []
    while parts:
        end = int(parts[0]) + 1
        found.append(parts[1:end])
        parts = parts[end:]
    return found
