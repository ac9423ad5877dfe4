"""One atomic snapshot of a whole run.

A snapshot is a folder ``<save>/iter_0000012`` (the number is the rollout id) whose last written file
is ``manifest.json``. While ranks fill it, it is a hidden folder ``<save>/.iter_0000012.tmp-…``; one
committer syncs every file, writes the manifest and renames the folder. Whatever dies when, a folder
named ``iter_*`` is complete. There is one writer per ``<save>``.

    temp = begin(save, rollout_id)
    ... all ranks write below temp ...
    commit(temp, {"rollout_id": rollout_id, "attempt": 0, ...})

``latest`` takes the snapshot that was committed last (manifest entry ``sequence``), not the one with
the highest number: after going back with ``--ckpt-step`` the old, higher numbers belong to a lineage
that was left. ``latest_checkpointed_iteration.txt`` (Megatron's name) is written for other tools.
The state of the data source is in ``iter_*/rollout/global_dataset_state_dict_<id>.pt``; the same file
is published as ``<save>/rollout/global_dataset_state_dict_<id>.pt``, where existing tools look for it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from slime.checkpoint.files import FileEntry, describe_files, digest_files, sync_path, write_atomically
from slime.checkpoint.manifest import Facts, Manifest, library_versions

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = 1
_ITERATION = re.compile(r"iter_(\d{7,})")
_TEMPORARY = re.compile(r"\.iter_\d{7,}\.tmp-.*")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced")
_RESTORE = "Restore the file, or load an older one with --ckpt-step"
_DATA_STATE = "rollout/global_dataset_state_dict_*.pt"
_OF_OTHERS = ("common.pt", ".metadata", "metadata.json", "*.distcp", "mp_rank_*")
"""What Megatron-LM and programs built on it write inside a checkpoint."""


class SnapshotError(RuntimeError):
    """A snapshot cannot be written or read; the message names folder and file and says what to do."""


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot on disk."""

    path: Path
    manifest: Manifest

    @property
    def iteration(self) -> int:
        return self.manifest["rollout_id"]


def folder_name(rollout_id: int) -> str:
    return f"iter_{rollout_id:07d}"


# --- writing -------------------------------------------------------------------------------------


def begin(save_dir: Path, rollout_id: int) -> Path:
    """A hidden, empty folder for all ranks to write into. Removes what an interrupted save left behind.

    Raises:
        SnapshotError: ``save_dir`` holds checkpoints of another program (:func:`foreign`).
    """
    save_dir.mkdir(parents=True, exist_ok=True)
    refuse_foreign(save_dir)
    clean_up(save_dir)
    temp = save_dir / f".{folder_name(rollout_id)}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    temp.mkdir()
    return temp


def commit(temp: Path, facts: Facts, written: Sequence[FileEntry] = ()) -> Path:
    """Make ``temp`` the snapshot ``iter_<rollout_id>`` and return its path.

    The manifest gets ``facts``, the list of files with sizes and digests, the sequence number, library versions and
    the time.

    Args:
        written: files that their writers have made durable and digested, with paths relative to ``temp``. They are
            not read again; all others are.

    Raises:
        SnapshotError: ``temp`` is not from :func:`begin`, belongs to another rollout, or is empty, or a file in
            ``written`` is missing or has another size.
    """
    rollout_id = facts["rollout_id"]
    name = folder_name(rollout_id)
    if not temp.is_dir() or not temp.name.startswith(f".{name}.tmp-"):
        raise SnapshotError(f"{temp} is not an open snapshot of rollout {rollout_id}: pass the folder of begin()")
    save_dir = temp.parent
    files = _describe_files(temp, written)
    if not files:
        raise SnapshotError(f"{temp} is empty: nothing was written before the commit of rollout {rollout_id}")
    full: Manifest = {
        "format": FORMAT,
        "sequence": 1 + max((s.manifest["sequence"] for s in snapshots(save_dir)), default=0),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "libraries": library_versions(),
        **facts,
        "files": files,
    }
    write_atomically(temp / MANIFEST, lambda file: file.write(json.dumps(full, indent=1, sort_keys=True).encode()))
    final = save_dir / name
    _rename_over(temp, final)
    write_atomically(save_dir / TRACKER, lambda file: file.write(f"{rollout_id}\n".encode()))
    for source in final.glob(_DATA_STATE):
        state = source.read_bytes()
        write_atomically(save_dir / "rollout" / source.name, lambda file, state=state: file.write(state))  # type: ignore[misc]
    return final


def _describe_files(folder: Path, written: Sequence[FileEntry]) -> list[FileEntry]:
    """Path, size and digest of every file below ``folder``; all of it is on disk afterwards."""
    known = {entry["path"]: entry for entry in written}
    if problems := _wrong_sizes(folder, written):
        raise SnapshotError(f"the snapshot in {folder} is not what its ranks wrote: {'; '.join(problems.values())}")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    others = [path for path in paths if path.relative_to(folder).as_posix() not in known]
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_path(directory)
    return sorted([*written, *describe_files(others, folder)], key=lambda entry: entry["path"])


def _rename_over(temp: Path, final: Path) -> None:
    """Rename ``temp`` to ``final``. A folder that stands there steps aside first, where :func:`snapshots`
    still finds it, so that at each moment one of the two is complete and visible."""
    aside = final.with_name(f".{final.name}.replaced")
    if final.is_dir() and not (final / MANIFEST).is_file():
        raise SnapshotError(
            f"{final} was not written by slime (it has no {MANIFEST}) and is not replaced: give another --save. "
            f"The new snapshot is complete in {temp}"
        )
    if final.exists() or final.is_symlink():
        os.replace(final, aside)
    os.replace(temp, final)
    sync_path(final.parent)
    if aside.exists() or aside.is_symlink():
        _remove(aside)


def _remove(folder: Path) -> None:
    """Delete a folder. Where it is a symbolic link, delete the link and leave its target alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def clean_up(save_dir: Path) -> None:
    """Remove half-written snapshots; put back one whose replacement was never finished."""
    for path in list(save_dir.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            _remove(path)
        elif replaced := _REPLACED.fullmatch(path.name):
            final = save_dir / f"iter_{replaced[1]}"
            if (final / MANIFEST).is_file():
                _remove(path)
            elif not final.exists() and (path / MANIFEST).is_file():
                os.replace(path, final)
                sync_path(save_dir)


def prune(save_dir: Path, keep: int, every: int | None = None) -> list[Path]:
    """Delete all but the ``keep`` snapshots that were committed last; returns what was deleted.

    Args:
        every: the snapshot after each so many rollouts stays too.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one snapshot must stay")
    older = sorted(snapshots(save_dir), key=lambda each: each.manifest["sequence"])[:-keep]
    doomed = [snapshot for snapshot in older if not every or (snapshot.iteration + 1) % every]
    for snapshot in doomed:
        # The manifest goes first: from then on the folder counts as half-written.
        hidden = save_dir / f".{snapshot.path.name}.tmp-pruned-{secrets.token_hex(4)}"
        os.replace(snapshot.path, hidden)
        _remove(hidden)
        (save_dir / "rollout" / f"global_dataset_state_dict_{snapshot.iteration}.pt").unlink(missing_ok=True)
    return [snapshot.path for snapshot in doomed]


# --- reading -------------------------------------------------------------------------------------


def foreign(path: Path) -> list[str]:
    """Names in ``path`` that show checkpoints of another program; empty for a folder that slime can use.

    These are ``iter_*`` folders without a manifest, a ``release`` folder, a tracker file without any snapshot,
    and the files of one Megatron checkpoint.
    """
    if not path.is_dir() or (path / MANIFEST).is_file():
        return []
    iterations = [entry for entry in path.iterdir() if _ITERATION.fullmatch(entry.name) and entry.is_dir()]
    found = sorted(f"{entry.name}/" for entry in iterations if not (entry / MANIFEST).is_file())
    found += ["release/"] if (path / "release").is_dir() else []
    if (path / TRACKER).is_file() and (found or not snapshots(path)):
        found.append(TRACKER)
    if _number(path) is not None or path.name == "release":
        found += sorted(entry.name for pattern in _OF_OTHERS for entry in path.glob(pattern))
    return found


def refuse_foreign(path: Path, option: str = "--save") -> None:
    """Raise :class:`SnapshotError` where ``path`` holds checkpoints of another program (:func:`foreign`)."""
    found = foreign(path)
    if found == [TRACKER] and option == "--save":
        return  # nothing can be lost: the checkpoints that it counted are gone
    if found:
        shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        use = (
            "slime would write among them and replace their tracker file: give another folder"
            if option == "--save"
            else "convert them to a Hugging Face folder with the converter of the program that wrote them, for "
            "example its convert_torch_dist_to_hf.py, and pass that folder as --load or --hf-checkpoint "
            "(for Megatron weights, convert it again with tools/convert_hf_to_torch_dist.py)"
        )
        raise SnapshotError(f"{option} {path} holds checkpoints that slime did not write ({shown}): {use}")


def kind(path: Path) -> Literal["snapshots", "iteration", "hf", "empty"]:
    """What ``--load`` names: a folder of snapshots, one of them, a Hugging Face model, or nothing of ours."""
    if (path / MANIFEST).is_file() and _number(path) is not None:
        return "iteration"
    if path.is_dir() and snapshots(path):
        return "snapshots"
    return "hf" if (path / "config.json").is_file() else "empty"


def snapshots(save_dir: Path) -> list[Snapshot]:
    """All complete snapshots in a folder, by iteration."""
    found: dict[int, Snapshot] = {}
    for path in sorted(save_dir.iterdir()) if save_dir.is_dir() else []:
        number = _number(path)
        if number is None or not (path / MANIFEST).is_file():
            continue
        if number in found and _REPLACED.fullmatch(path.name):
            continue
        found[number] = _read(path)
    return [found[number] for number in sorted(found)]


def latest(load_dir: Path, step: int | None = None, digests: bool = True) -> Snapshot | None:
    """The snapshot to go on from, checked (:func:`verify`).

    Args:
        load_dir: a folder of snapshots, or one ``iter_*`` folder.
        step: a certain iteration (``--ckpt-step``) instead of the one committed last.
        digests: also compare the digests of the files that no training rank wrote (:func:`verify`).

    Returns:
        None where there is no snapshot: a folder that does not exist yet, an empty one, or a Hugging
        Face model (:func:`kind`).

    Raises:
        SnapshotError: ``step`` is not there, a file of the snapshot is missing or damaged, or the folder holds only
            checkpoints of another program.
    """
    what = kind(load_dir)
    if what == "empty":
        refuse_foreign(load_dir, "--load")
    if what == "iteration":
        found = _read(load_dir)
        if step is not None and step != found.iteration:
            raise SnapshotError(f"{load_dir} is iteration {found.iteration}, but --ckpt-step asks for {step}")
    else:
        present = snapshots(load_dir) if what == "snapshots" else []
        if step is not None:
            present = _only(present, step, load_dir)
        if not present:
            return None
        found = max(present, key=lambda each: each.manifest["sequence"])
    verify(found, digests)
    return found


def verify(snapshot: Snapshot, digests: bool = True, of_ranks: bool = False) -> None:
    """Compare the snapshot with its manifest: the size of every file, and digests.

    Args:
        digests: compare digests; otherwise sizes only.
        of_ranks: also those of the files that training ranks wrote. They are most of the bytes; the ranks that read
            the snapshot compare them (:func:`damaged_part`).

    Raises:
        SnapshotError: names all files that differ.
    """
    entries = snapshot.manifest["files"]
    wrong = _wrong_sizes(snapshot.path, entries)
    whole = [entry for entry in entries if entry["path"] not in wrong]
    compared = [entry for entry in whole if digests and (of_ranks or "rank" not in entry)]
    problems = [*wrong.values(), *_changed(snapshot.path, compared)]
    if problems:
        raise SnapshotError(f"snapshot {snapshot.path} is damaged: {'; '.join(problems)}. {_RESTORE}")


def damaged_part(folder: Path, rank: int, ranks: int) -> str | None:
    """What is wrong with a rank's share of the files in a role's ``folder`` of a snapshot; None if nothing is.

    The share is what the ranks with this number modulo ``ranks`` wrote: with as many ranks as then, its own files.
    Without a manifest beside ``folder`` there is nothing to compare.
    """
    if not (folder.parent / MANIFEST).is_file():
        return None
    found = _read(folder.parent)
    entries = [e for e in found.manifest["files"] if "rank" in e and e["rank"] % ranks == rank]
    problems = _changed(found.path, [e for e in entries if e["path"].startswith(f"{folder.name}/")])
    return f"snapshot {found.path} is damaged: {'; '.join(problems)}. {_RESTORE}" if problems else None


def _wrong_sizes(folder: Path, entries: Sequence[FileEntry]) -> dict[str, str]:
    """Files that are missing or have another size, with that in words."""
    problems = {}
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file():
            problems[entry["path"]] = f"{entry['path']} is missing"
        elif path.stat().st_size != entry["size"]:
            found = path.stat().st_size
            problems[entry["path"]] = f"{entry['path']} has {found} bytes instead of {entry['size']}"
    return problems


def _changed(folder: Path, entries: Sequence[FileEntry]) -> list[str]:
    """Files whose digest is not that of their entry, in words."""
    digests = digest_files([folder / entry["path"] for entry in entries])
    return [
        f"{entry['path']} has changed (digest {actual}, not {entry['digest']})"
        for entry, actual in zip(entries, digests, strict=True)
        if actual != entry["digest"]
    ]


def _read(path: Path) -> Snapshot:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path / MANIFEST} is not JSON ({error}): it was changed after it was written") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise SnapshotError(f"{path / MANIFEST} has format {found}, this version reads {FORMAT}")
    if problem := _manifest_problem(manifest):
        raise SnapshotError(f"{path / MANIFEST} was changed after it was written: {problem}")
    return Snapshot(path, cast(Manifest, manifest))


def _manifest_problem(manifest: Mapping[str, object]) -> str | None:
    """What a hand-edited manifest lacks of what every reader relies on."""
    for name, kind in (("rollout_id", int), ("sequence", int), ("files", list)):
        if type(manifest.get(name)) is not kind:
            return f"{name} is {str(manifest.get(name))[:40]!r}, not {'a list' if kind is list else 'a number'}"
    entries = manifest["files"]
    assert isinstance(entries, list)
    for entry in entries:
        if not isinstance(entry, dict) or not {"path", "size", "digest"} <= entry.keys():
            return f"an entry of files is {str(entry)[:80]!r}, not a path with its size and digest"
        if not isinstance(entry["path"], str) or ".." in Path(entry["path"]).parts or entry["path"].startswith("/"):
            return f"an entry of files names {str(entry['path'])[:80]!r}, outside the snapshot"
    return None


def _number(path: Path) -> int | None:
    match = _ITERATION.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def _only(present: list[Snapshot], step: int, load_dir: Path) -> list[Snapshot]:
    chosen = [snapshot for snapshot in present if snapshot.iteration == step]
    if not chosen:
        there = ", ".join(str(snapshot.iteration) for snapshot in present) or "none"
        raise SnapshotError(f"{load_dir} has no snapshot of iteration {step} (--ckpt-step); there are: {there}")
    return chosen
