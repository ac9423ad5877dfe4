"""Rules for runs that died or hang: from the driver's state, its error, the logs, and the processes
that are left.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from slime.observability.run_state import message_lines

from .evidence import memory_table
from .facts import Facts, Finding, shortened

PACKAGE = str(Path(__file__).resolve().parents[3])
LONG_SECONDS = 120.0
LONG_FACTOR = 5.0
"""A phase hangs if it lasts longer than this, and longer than this many times its median."""
WAIT_SHARE = 0.5
"""A wait is long if it has lasted longer than this part of its deadline."""
_LOOPS = ("train.py", "train_async.py")
_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib/python3(\.\d+)?/|\.pyx$")
"""Files of Python and of installed packages, also of another machine; Cython's have a path of where
it was compiled.
"""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class Pattern(NamedTuple):
    """A cause that is known by a text in the error or in a log.

    Attributes:
        with_logs: Whether the last lines of all logs may say more, because another process failed
            first.
    """

    kind: str
    text: re.Pattern[str]
    title: str
    advice: str
    with_logs: bool


def _pattern(kind: str, text: str, title: str, advice: str, with_logs: bool = False) -> Pattern:
    return Pattern(kind, re.compile(text), title, advice, with_logs)


PATTERNS = (
    _pattern(
        "gpu_memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError|CUDA error: out of memory",
        "A process needed more GPU memory than there is.",
        "Give the trainer smaller micro-batches (--max-tokens-per-gpu), recompute activations "
        "(--gradient-checkpointing, with Megatron --recompute-granularity full), or leave it more memory in a "
        "colocated run (a smaller --sglang-mem-fraction-static).",
    ),
    _pattern(
        "host_memory",
        r"Ray killed \d+ worker|ray\.exceptions\.OutOfMemoryError|low on memory|Cannot allocate memory|MemoryError",
        "The machine has run out of memory.",
        "End other programs on it, or use fewer engines (--rollout-num-gpus), shorter responses or a smaller model.",
    ),
    _pattern(
        "shared_memory",
        r"/dev/shm[^\n]*No space left|No space left[^\n]*/dev/shm|Bus error|SIGBUS",
        "The shared memory (/dev/shm) is full.",
        "Give the container more (docker run --shm-size=16g), or remove what ended programs have left there.",
    ),
    _pattern(
        "disk_full",
        r"No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Make room, or write snapshots and logs to another disk (--save, --output-dir); --log-keep-last and "
        "--save-keep-last limit what is kept.",
    ),
    _pattern(
        "open_files",
        r"Too many open files",
        "A process may not open more files and connections.",
        "Raise the limit of the shell that starts the run (ulimit -n 65536), or lower --sglang-server-concurrency.",
    ),
    _pattern(
        "port_in_use",
        r"[Aa]ddress already in use",
        "A port was taken by another process.",
        "Look whether another run or server uses it (ss -ltnp), or choose another one.",
    ),
    _pattern(
        "collective_timeout",
        r"Watchdog caught collective operation timeout|NCCL error|nccl(System|Remote|Internal)Error|"
        r"Timed out after \d+ms waiting for|gloo/transport/[^\n]*(closed|reset) by peer",
        "A collective operation of the training ranks failed: one of them did not take part, or the network failed.",
        "Look for the first rank with an error in the logs of the train actors; with NCCL_DEBUG=INFO, NCCL names the "
        "connection.",
        with_logs=True,
    ),
    _pattern(
        "gpu_fault",
        r"CUDA error: (an illegal memory access|device-side assert|unspecified launch failure)|"
        r"Xid \d+|uncorrectable ECC",
        "A GPU reported an error.",
        "Start once more with CUDA_LAUNCH_BLOCKING=1 to see the operation; look into dmesg for Xid lines of the "
        "driver.",
    ),
    _pattern(
        "gpu_software",
        r"CUDA driver version is insufficient|no kernel image is available|forward compatibility was attempted",
        "PyTorch does not fit the GPU or its driver.",
        "Install the driver that this PyTorch needs (nvidia-smi shows yours), or a PyTorch for your driver.",
    ),
    _pattern(
        "bad_checkpoint",
        r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|slime\.models\.\S*ModelError|incomplete metadata",
        "A checkpoint cannot be read, or does not fit the model.",
        "The message names the file or tensor: download or convert it again, or correct --hf-checkpoint or --load.",
    ),
    _pattern(
        "data_exhausted",
        r"all \d+ prompts[^\n]* are longer than --rollout-max-prompt-len|"
        r"the data source has no more groups",
        "The data has no prompts that can be used.",
        "Raise --rollout-max-prompt-len, or look at the slice of the file and at the columns (--input-key): slime "
        "train --dry-run counts the rows.",
    ),
    _pattern(
        "ledger",
        r"LedgerError",
        "The account of the groups does not close: a group was lost or counted twice.",
        "This is a defect of slime or of a custom rollout function: slime ledger shows the group; please report it.",
    ),
    _pattern(
        "hidden_module",
        rf"hides Python's own module|: (partially initialized )?module '({'|'.join(sys.stdlib_module_names)})' has no",
        "A file on the import path has the name of a module of Python's, and is imported in its place.",
        "Rename the file (random.py, types.py or the like), or take its folder off PYTHONPATH.",
    ),
    _pattern(
        "wait_expired",
        r"waited \d+ s( \(deadline \d+ s[^)\n]*\))? for [^\n]+|"
        r"did not finish within \S+ s (\(--phase-timeout\)|before a)|"
        r"did not answer for \d+ s \(--status-timeout\)[^\n]*|TimeoutError: [^\n]*\(--phase-timeout\)",
        "A process did not answer within its deadline.",
        "The line names who waited for what. Look at the end of that process's log below; --phase-timeout and the "
        "other flags of deadlines give slow machines more time.",
        with_logs=True,
    ),
    _pattern(
        "process_lost",
        r"ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|was lost: its process",
        "A process of the run died.",
        "Its log below may say why. With --max-restarts N and --save, a run continues by itself from its last "
        "snapshot.",
        with_logs=True,
    ),
    _pattern(
        "server_failed",
        r"\(pid \d+\) (ended with status|was not healthy after)|\.ServerFailed: ",
        "An engine or a router did not start, ended, or refused a request.",
        "The end of its log below says why: often too little memory (--sglang-mem-fraction-static), or an option that "
        "this engine does not know.",
        with_logs=True,
    ),
)  # fmt: skip

_DROPPED = re.compile(
    r"rollout \d+ did not finish within [^\n]*?(\d+) of (\d+) groups are accepted \((\d+ dropped as [^)\n]*).*"
)
"""What a rollout says at its deadline if groups were dropped, with the number for each reason."""
_BY_FILTER = re.compile(r"(\d+) dropped as (?!prompt_too_long\b)")

_AT_CREATION = "raised in its creation task"
"""Part of Ray's message when the constructor of an actor raised an error."""

CONSEQUENCES = frozenset(pattern.kind for pattern in PATTERNS if pattern.with_logs)
"""What the driver sees when another process failed first."""
END_CHARACTERS = 4000
"""The end of a log in which the cause of such a failure is looked for; before it are troubles that
were survived.
"""


def end_of_run(facts: Facts) -> Iterator[Finding]:
    """Why the run failed, or that its driver was killed."""
    if not (facts.failed or facts.died):
        return
    assert facts.state is not None
    error = facts.state.error
    own = None if facts.died else _own_function(error)
    # In the error first: logs may also contain troubles that the run has survived.
    finding = _match(facts, {"the error that ended the run": error}) or (
        None if own else _match(facts, facts.logs)
    )
    if finding is not None and finding.kind == "process_lost" and _AT_CREATION in error:
        # the process did not die by itself: its constructor raised an error, and would again
        finding = None
    # The driver often sees only that another process is gone, whose log says why.
    if finding is not None and finding.kind in CONSEQUENCES:
        finding = _cause_in_logs(facts, finding) or finding
    if own is not None and (finding is None or finding.kind in ("process_lost", "bad_checkpoint")):
        finding = own
    finding = _starved(error) or finding
    if finding is not None:
        yield finding
    elif facts.died:
        yield Finding(
            "driver_killed",
            f"The driver (pid {facts.state.pid}) was killed from outside, {_phase(facts)}.",
            facts.last_lines(),
            "Nothing in the logs says why: often the kernel ran out of memory (dmesg -T | grep "
            "-i kill), or a session or a job of a cluster ended. Continue from the last snapshot "
            "(--load); --max-restarts does so by itself.",
        )
    else:
        what = (
            "A process of the run raised an error when it was set up"
            if _AT_CREATION in error
            else ""
        )
        yield Finding(
            "error",
            f"{what or 'The run ended with an error'}, {_phase(facts)}.",
            (*_message(error), *facts.last_lines()),
            "The whole traceback is in state.json in the folder of the run.",
        )


def _starved(error: str) -> Finding | None:
    """A finding if a rollout was not finished because its filter has dropped most groups."""
    # The rollout itself counts what its filter has dropped, and says so at its deadline.
    match = _DROPPED.search(error)
    if match is None:
        return None
    accepted = int(match[1])
    wanted = int(match[2])
    dropped = sum(map(int, _BY_FILTER.findall(match[3])))
    if dropped < 2 * max(wanted, accepted):
        return None
    return Finding(
        "filter_starvation",
        f"The filter threw {dropped} groups away and kept {accepted} of {wanted} until the "
        "rollout's deadline.",
        (match[0],),
        "Look at --dynamic-sampling-filter-path with slime check-hooks; use prompts of another "
        "difficulty, or a weaker filter. --phase-timeout gives a rollout more time.",
    )


def _cause_in_logs(facts: Facts, consequence: Finding) -> Finding | None:
    """Return what another process said at its end, if this explains why the driver lost it or
    waited in vain.
    """
    # Only the ends of the logs, and only causes: a log may be full of consequences.
    ends = {
        name: text[-END_CHARACTERS:] for name, text in facts.logs.items() if name != "driver.log"
    }
    cause = _match(
        facts, ends, [pattern for pattern in PATTERNS if pattern.kind not in CONSEQUENCES]
    )
    return cause and replace(cause, evidence=(*cause.evidence, *consequence.evidence[:1]))


def hanging(facts: Facts) -> Iterator[Finding]:
    """A process that is stopped by a signal, or a phase that lasts much longer than before."""
    state = facts.state
    if state is None or state.status != "running" or not facts.processes:
        return
    # A stopped process explains every wait.
    stopped = [f"pid {one.pid}: {one.name}" for one in facts.processes if one.stopped]
    seconds = facts.now - state.since
    if stopped:
        yield Finding(
            "process_stopped",
            "A process of the run is stopped by a signal (SIGSTOP or a debugger), so that the "
            "others wait for it.",
            (*_named_wait(facts), *stopped, *facts.looked_into()),
            "Let it go on with kill -CONT PID.",
        )
        return
    # A phase is compared with its own past, and a wait with its deadline.
    usual = facts.series(f"perf/{state.phase}_time")
    limit = max(LONG_SECONDS, LONG_FACTOR * median(usual)) if usual else None
    if limit is not None and seconds > limit:
        yield Finding(
            "phase_hangs",
            f"The run is in the phase {state.phase} for {seconds:.0f} s; its median is "
            f"{median(usual):.1f} s.",
            (*_named_wait(facts), *facts.looked_into(), *facts.last_lines()),
            "The process that the others wait for is the one whose stack is not in a wait. "
            "py-spy dump --pid PID shows all threads of a process; the logs end with what each "
            "has done last.",
        )
    elif state.waiting and facts.now - state.waiting_since > max(
        LONG_SECONDS, WAIT_SHARE * state.deadline
    ):
        yield Finding(
            "long_wait",
            f"The driver waits for {state.waiting} since {facts.now - state.waiting_since:.0f} s; "
            f"after {state.deadline:.0f} s it gives up.",
            (*_named_wait(facts), *facts.looked_into(), *facts.last_lines()),
            "Look at the process that it waits for; --phase-timeout and other flags of deadlines "
            "give it more time.",
        )


def _named_wait(facts: Facts) -> Iterator[str]:
    """What the driver waits for, and what the processes that it waits for have last said."""
    state = facts.state
    if state is None or not state.waiting:
        return
    yield (
        f"the driver waits for {state.waiting} since {facts.now - state.waiting_since:.0f} s "
        f"(deadline {state.deadline:.0f} s)"
    )
    # What was said long ago tells which process is stuck.
    for name, said in state.said.items():
        if said:
            total = f"/{said['total']}" if said.get("total") else ""
            ago = facts.now - said.get("updated", facts.now)
            yield (
                f"{name} said {ago:.0f} s ago: {said.get('phase', '?')} "
                f"{said.get('done', 0)}{total}"
            )


def _phase(facts: Facts) -> str:
    assert facts.state is not None
    phase = facts.state.phase
    return f"in the phase {phase}" if phase else "between two phases"


def _match(
    facts: Facts, texts: Mapping[str, str], patterns: Sequence[Pattern] = PATTERNS
) -> Finding | None:
    # Patterns come before places: the more specific cause is meant, wherever it stands.
    for pattern in patterns:
        for where, text in texts.items():
            if (match := pattern.text.search(text)) is not None:
                line = _line_at(text, match.start())
                message = _message(text)
                more = message[1:] if message[:1] == [line] else ()
                memory = (
                    memory_table(facts, text[match.start() :])
                    if pattern.kind == "gpu_memory"
                    else ()
                )
                shown = (
                    f"{where}: {line}",
                    *more,
                    *memory,
                    *(facts.last_lines() if pattern.with_logs else ()),
                )
                return Finding(
                    pattern.kind, f"{pattern.title[:-1]} ({_phase(facts)}).", shown, pattern.advice
                )
    return None


def _message(error: str) -> list[str]:
    return shortened(message_lines(error) or error.strip().splitlines()[-1:])


def _own_function(error: str) -> Finding | None:
    """A finding if the innermost frame that is in no library is in a file of the user's."""
    frames = [frame for frame in _FRAME.findall(error) if not _LIBRARY.search(frame[0])]
    # The run may have had slime in another place than this command, such as a container.
    roots = tuple({root for file, _, _ in frames if (root := _root_of_slime(file)) is not None})
    if (
        not frames
        or frames[-1][0].startswith((PACKAGE, *roots))
        or Path(frames[-1][0]).name in _LOOPS
    ):
        return None
    file, line, function = frames[-1]
    return Finding(
        "own_function",
        f"Your function {function} raised an error.",
        (f"{file}:{line}", *_message(error)),
        "Correct it; slime check-hooks calls it on many kinds of samples in seconds.",
    )


def _root_of_slime(file: str) -> str | None:
    """Return the folder of slime in which a file lies; None if slime has no such file."""
    folder, found, inside = file.rpartition("/slime/")
    try:
        return folder + found if found and (Path(PACKAGE) / inside).is_file() else None
    except OSError:  # too long for the name of a file
        return None


def _line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else len(text)].strip()[:300]
