"""Atomic snapshots of a whole run.

A snapshot is a folder ``<save>/iter_0000012`` (the number is the rollout id) with a file
``manifest.json``, which is written last. While the ranks write it, it is a hidden folder
``<save>/.iter_0000012.tmp-…``. Then one process syncs every file to the disk, writes the manifest
and renames the folder. A folder named ``iter_*`` is therefore always complete, whichever process
dies at whatever time. Only one run may write to a folder ``<save>``::

    temp = begin(save, rollout_id)
    ... all ranks write below temp ...
    commit(temp, {"rollout_id": rollout_id, "attempt": 0, ...})

:func:`latest` selects the snapshot that was committed last (``sequence`` in the manifest), not the
one with the highest number: after a resume from an older one with ``--ckpt-step``, the higher
numbers belong to a history that was abandoned. ``latest_checkpointed_iteration.txt`` (Megatron's
name) is written for other tools. The state of the data source is in
``iter_*/rollout/global_dataset_state_dict_<id>.pt`` and, for existing tools that look there, also
in ``<save>/rollout/global_dataset_state_dict_<id>.pt``.
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

from slime.checkpoint.files import FileEntry, describe_files, digest_files
from slime.checkpoint.manifest import Facts, Manifest, library_versions
from slime.data.plain_values import state_file, sync_path, write_atomically
from slime.observability.files import best_effort, warn

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = 1
_ITERATION = re.compile(r"iter_(\d{7,})")
_TEMPORARY = re.compile(r"\.iter_\d{7,}\.tmp-.*")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced")
_RESTORE = "Restore the file, or load an older snapshot with --ckpt-step"
_DATA_STATE = "rollout/global_dataset_state_dict_*.pt"
_OF_OTHERS = ("common.pt", ".metadata", "metadata.json", "*.distcp", "mp_rank_*")
"""Files that Megatron-LM and programs built on it write inside a checkpoint."""


class SnapshotError(RuntimeError):
    """A snapshot cannot be written or read. The message names the folder and the file, and says
    what to do.
    """


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
    """Create a hidden, empty folder into which all ranks write. Remains of interrupted saves are
    removed.

    Raises:
        SnapshotError: ``save_dir`` contains checkpoints of another program (:func:`foreign`).
    """
    save_dir.mkdir(parents=True, exist_ok=True)
    refuse_foreign(save_dir)
    clean_up(save_dir)
    temp = save_dir / f".{folder_name(rollout_id)}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    temp.mkdir()
    return temp


def commit(temp: Path, facts: Facts, written: Sequence[FileEntry] = ()) -> Path:
    """Make ``temp`` the snapshot ``iter_<rollout_id>`` and return its path.

    The manifest contains ``facts``, the files with sizes and digests, the sequence number, library
    versions and the time.

    Args:
        temp: The folder that :func:`begin` returned.
        written: Files that their writers have already synced and digested, with paths relative to
            ``temp``. They are not read again; all other files are.

    Raises:
        SnapshotError: ``temp`` is not a folder of :func:`begin` for this rollout, or it is empty,
            or a file in ``written`` is missing or has another size.
    """
    rollout_id = facts["rollout_id"]
    name = folder_name(rollout_id)
    if not temp.is_dir() or not temp.name.startswith(f".{name}.tmp-"):
        raise SnapshotError(
            f"{temp} is not an open snapshot of rollout {rollout_id}: pass the folder of begin()"
        )
    save_dir = temp.parent
    files = _describe_files(temp, written)
    if not files:
        raise SnapshotError(
            f"{temp} is empty: nothing was written before the commit of rollout {rollout_id}"
        )
    full: Manifest = {
        "format": FORMAT,
        "sequence": 1 + max((s.manifest["sequence"] for s in snapshots(save_dir)), default=0),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "libraries": library_versions(),
        **facts,
        "files": files,
    }
    write_atomically(
        temp / MANIFEST,
        lambda file: file.write(json.dumps(full, indent=1, sort_keys=True).encode()),
    )
    final = save_dir / name
    _rename_over(temp, final)
    with best_effort(f"{TRACKER} and {_DATA_STATE} in {save_dir}, which only other programs read"):
        write_atomically(save_dir / TRACKER, lambda file: file.write(f"{rollout_id}\n".encode()))
        for source in final.glob(_DATA_STATE):
            state = source.read_bytes()
            copy = save_dir / "rollout" / source.name
            write_atomically(copy, lambda file, state=state: file.write(state))  # type: ignore[misc]
    return final


def copy_part(
    source: Path, role: str, save_dir: Path, facts: Facts, written: Sequence[FileEntry]
) -> Path:
    """Make a snapshot in ``save_dir`` of one role's folder of the snapshot ``source``, with hard
    links where both are on one disk.

    Args:
        facts, written: As for :func:`commit` of ``source``.
    """

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:  # another disk, or one without links
            shutil.copy2(file, copy)

    temp = begin(save_dir, facts["rollout_id"])
    shutil.copytree(source / role, temp / role, copy_function=link)
    return commit(temp, facts, [one for one in written if one["path"].startswith(f"{role}/")])


def _describe_files(folder: Path, written: Sequence[FileEntry]) -> list[FileEntry]:
    """Return path, size and digest of every file below ``folder``. Everything is synced to the
    disk.
    """
    known = {entry["path"]: entry for entry in written}
    if problems := _wrong_sizes(folder, written):
        raise SnapshotError(
            f"the snapshot in {folder} is not what its ranks wrote: {'; '.join(problems.values())}"
        )
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    others = [path for path in paths if path.relative_to(folder).as_posix() not in known]
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_path(directory)
    return sorted([*written, *describe_files(others, folder)], key=lambda entry: entry["path"])


def _rename_over(temp: Path, final: Path) -> None:
    """Rename ``temp`` to ``final``.

    A folder that exists there is renamed first, to a name under which :func:`snapshots` still finds
    it. So at any moment one of the two is complete and visible, although a non-empty folder cannot
    be replaced atomically.
    """
    aside = final.with_name(f".{final.name}.replaced")
    if final.is_dir() and not (final / MANIFEST).is_file():
        raise SnapshotError(
            f"{final} was not written by slime (it has no {MANIFEST}) and is not replaced: set "
            f"another --save. The new snapshot is complete in {temp}"
        )
    if final.exists() or final.is_symlink():
        os.replace(final, aside)
    os.replace(temp, final)
    sync_path(final.parent)
    if aside.exists() or aside.is_symlink():
        _remove(aside)


def _remove(folder: Path) -> None:
    """Delete a folder, or try to. If it is a symbolic link, delete only the link."""
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:  # on NFS, while another process has one of its files open
        warn(f"{folder} could not be deleted; the next save tries again: {error}")


def clean_up(save_dir: Path) -> None:
    """Remove incomplete snapshots, and restore a snapshot whose replacement was interrupted."""
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
    """Delete all but the ``keep`` snapshots that were committed last.

    Args:
        every: Also keep the snapshot after every ``every`` rollouts.

    Returns:
        The folders that were deleted.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one snapshot must stay")
    older = sorted(snapshots(save_dir), key=lambda each: each.manifest["sequence"])[:-keep]
    doomed = [snapshot for snapshot in older if not every or (snapshot.iteration + 1) % every]
    for snapshot in doomed:
        # The rename marks the folder as incomplete. If the deletion is interrupted, the rest cannot
        # be taken for a snapshot, and the next save removes it.
        hidden = save_dir / f".{snapshot.path.name}.tmp-pruned-{secrets.token_hex(4)}"
        os.replace(snapshot.path, hidden)
        _remove(hidden)
        state_file(save_dir, snapshot.iteration).unlink(missing_ok=True)
    return [snapshot.path for snapshot in doomed]


# --- reading -------------------------------------------------------------------------------------


def foreign(path: Path) -> list[str]:
    """Return names in ``path`` that belong to checkpoints of another program; empty if slime can
    use the folder.

    These are ``iter_*`` folders without a manifest, a ``release`` folder, a tracker file without
    any snapshot, and the files of one Megatron checkpoint.
    """
    if not path.is_dir() or (path / MANIFEST).is_file():
        return []
    iterations = [
        entry for entry in path.iterdir() if _ITERATION.fullmatch(entry.name) and entry.is_dir()
    ]
    found = sorted(f"{entry.name}/" for entry in iterations if not (entry / MANIFEST).is_file())
    found += ["release/"] if (path / "release").is_dir() else []
    if (path / TRACKER).is_file() and (found or not snapshots(path)):
        found.append(TRACKER)
    if _number(path) is not None or path.name == "release":
        found += sorted(entry.name for pattern in _OF_OTHERS for entry in path.glob(pattern))
    return found


def refuse_foreign(path: Path, option: str = "--save") -> None:
    """Raise :class:`SnapshotError` if ``path`` contains checkpoints of another program
    (:func:`foreign`).
    """
    found = foreign(path)
    if found == [TRACKER] and option == "--save":
        return  # nothing can be lost: the checkpoints that the tracker counted no longer exist
    if found:
        shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        use = (
            "slime would write its snapshots next to them and replace their tracker file: set "
            "another folder"
            if option == "--save"
            else "convert them to a Hugging Face folder with the converter of the program that "
            "wrote them, for example its convert_torch_dist_to_hf.py, and pass that folder "
            "as --load or --hf-checkpoint (for Megatron weights, convert it again with "
            "tools/convert_hf_to_torch_dist.py)"
        )
        raise SnapshotError(
            f"{option} {path} holds checkpoints that slime did not write ({shown}): {use}"
        )


def kind(path: Path) -> Literal["snapshots", "iteration", "hf", "empty"]:
    """Return what ``--load`` names: a folder of snapshots, one snapshot, a Hugging Face model, or
    nothing known.
    """
    if (path / MANIFEST).is_file() and _number(path) is not None:
        return "iteration"
    if path.is_dir() and snapshots(path):
        return "snapshots"
    return "hf" if (path / "config.json").is_file() else "empty"


def snapshots(save_dir: Path) -> list[Snapshot]:
    """Return all complete snapshots in a folder, ordered by iteration."""
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
    """Return the snapshot to resume from, after a check (:func:`verify`).

    Args:
        load_dir: A folder of snapshots, or one ``iter_*`` folder.
        step: The iteration to select (``--ckpt-step``). Default: the one that was committed last.
        digests: Also compare the digests of the files that no training rank wrote (:func:`verify`).

    Returns:
        None if there is no snapshot: The folder does not exist, is empty, or is a Hugging Face
            model (:func:`kind`).

    Raises:
        SnapshotError: There is no snapshot of ``step``, a file of the snapshot is missing or
            damaged, or the folder contains only checkpoints of another program.
    """
    # A folder of another program is refused here, and not read as an empty one, which would start
    # from nothing.
    what = kind(load_dir)
    if what == "empty":
        refuse_foreign(load_dir, "--load")
    if what == "iteration":
        found = _read(load_dir)
        if step is not None and step != found.iteration:
            raise SnapshotError(
                f"{load_dir} is iteration {found.iteration}, but --ckpt-step asks for {step}"
            )
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
    """Compare the files of a snapshot with its manifest.

    Args:
        digests: Compare sizes and digests. Otherwise, compare only sizes.
        of_ranks: Also compare the digests of the files that training ranks wrote. These are most of
            the bytes, so normally the ranks that read the snapshot compare them, in parallel
            (:func:`damaged_part`).

    Raises:
        SnapshotError: Files differ. The message names all of them.
    """
    entries = snapshot.manifest["files"]
    wrong = _wrong_sizes(snapshot.path, entries)
    whole = [entry for entry in entries if entry["path"] not in wrong]
    compared = [entry for entry in whole if digests and (of_ranks or "rank" not in entry)]
    problems = [*wrong.values(), *_changed(snapshot.path, compared)]
    if problems:
        raise SnapshotError(
            f"snapshot {snapshot.path} is damaged: {'; '.join(problems)}. {_RESTORE}"
        )


def damaged_part(folder: Path, rank: int, ranks: int) -> str | None:
    """Check a rank's share of the files in a role's ``folder`` of a snapshot.

    The share is what the ranks with this number modulo ``ranks`` wrote. If the number of ranks has
    not changed, these are the rank's own files. Without a manifest next to ``folder`` nothing can
    be compared.

    Returns:
        What is wrong, or None.
    """
    if not (folder.parent / MANIFEST).is_file():
        return None
    found = _read(folder.parent)
    entries = [e for e in found.manifest["files"] if "rank" in e and e["rank"] % ranks == rank]
    problems = _changed(found.path, [e for e in entries if e["path"].startswith(f"{folder.name}/")])
    return (
        f"snapshot {found.path} is damaged: {'; '.join(problems)}. {_RESTORE}" if problems else None
    )


def _wrong_sizes(folder: Path, entries: Sequence[FileEntry]) -> dict[str, str]:
    """Return a description for each file that is missing or has another size."""
    problems = {}
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file():
            problems[entry["path"]] = f"{entry['path']} is missing"
        elif path.stat().st_size != entry["size"]:
            found = path.stat().st_size
            problems[entry["path"]] = (
                f"{entry['path']} has {found} bytes instead of {entry['size']}"
            )
    return problems


def _changed(folder: Path, entries: Sequence[FileEntry]) -> list[str]:
    """Return a description for each file whose digest differs from its entry."""
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
        raise SnapshotError(
            f"{path / MANIFEST} is not JSON ({error}): it was changed after it was written"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise SnapshotError(
            f"{path / MANIFEST} has format {found}, but this version reads format {FORMAT}"
        )
    if problem := _manifest_problem(manifest):
        raise SnapshotError(f"{path / MANIFEST} was changed after it was written: {problem}")
    return Snapshot(path, cast(Manifest, manifest))


def _manifest_problem(manifest: Mapping[str, object]) -> str | None:
    """Describe what is wrong in a manifest that was edited by hand; None if what readers need is
    valid.
    """
    for name, kind in (("rollout_id", int), ("sequence", int), ("files", list)):
        if type(manifest.get(name)) is not kind:
            return (
                f"{name} is {str(manifest.get(name))[:40]!r}, not "
                f"{'a list' if kind is list else 'a number'}"
            )
    entries = manifest["files"]
    assert isinstance(entries, list)
    for entry in entries:
        if not isinstance(entry, dict) or not {"path", "size", "digest"} <= entry.keys():
            return f"an entry of files is {str(entry)[:80]!r}, not a path with its size and digest"
        if (
            not isinstance(entry["path"], str)
            or ".." in Path(entry["path"]).parts
            or entry["path"].startswith("/")
        ):
            return f"an entry of files names {str(entry['path'])[:80]!r}, outside the snapshot"
    return None


def _number(path: Path) -> int | None:
    match = _ITERATION.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def _only(present: list[Snapshot], step: int, load_dir: Path) -> list[Snapshot]:
    chosen = [snapshot for snapshot in present if snapshot.iteration == step]
    if not chosen:
        there = ", ".join(str(snapshot.iteration) for snapshot in present) or "none"
        raise SnapshotError(
            f"{load_dir} has no snapshot of iteration {step} (--ckpt-step); there are: {there}"
        )
    return chosen
