"""Finding the newest good checkpoint, and reading one: only after every byte of it was compared with its digest."""

import dataclasses
import functools
import itertools
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem._blame import warn
from jaxmem._processes import Together
from jaxmem._units import format_bytes
from jaxmem.checkpoint import _errors, _files, _folder, _manifest
from jaxmem.checkpoint._leaves import Leaf
from jaxmem.checkpoint._manifest import Checkpoint
from jaxmem.checkpoint._match import Reading, match
from jaxmem.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError

_LOG = logging.getLogger(__name__)
_COUNT = itertools.count()  # the same in all processes, which ask in the same order
_MOST_NAMED = 3
DAMAGED: set[Path] = set()
"""Checkpoints that this process has found damaged."""


def absolute(folder: str | Path) -> Path:
    """A folder as an absolute path, which Orbax wants.

    Raises:
      CheckpointError: it is none of this machine's file system.
    """
    if not isinstance(folder, (str, Path)) or not str(folder):
        got = repr(folder) if isinstance(folder, str) else f"a {type(folder).__name__}"
        raise CheckpointError(wanted="a folder for checkpoints", got=got, do="Name one by a text or a Path.")
    if scheme := re.match(r"\w[\w+.-]+:/", str(folder)):
        raise CheckpointError(
            wanted="a folder of this machine's file system for checkpoints",
            got=f"{folder}, on {scheme[0]}/",
            do="Only folders are supported now: name one, or where the storage is mounted.",
        )
    try:
        found = Path(folder).expanduser().absolute()
        if b"\0" in os.fsencode(found):
            raise ValueError("a null character")
    except (RuntimeError, ValueError) as error:  # of a user without a home, or not to be encoded
        got = f"{str(folder)!a}: {error}".rstrip(".")
        raise CheckpointError(wanted="a folder for checkpoints", got=got, do="Choose another folder.") from error
    return found


def latest(folder: str | Path) -> Checkpoint | None:
    """The newest good checkpoint in a folder: all its files are what was written. None where there is none.

    What is passed over is named by a `CheckpointWarning` each. With several processes each verifies a share, and all
    of them return the same.

    Raises:
      CheckpointError: a newer jaxmem wrote the newest one.
      DamagedCheckpointError: all that were complete are damaged; to begin anew is for their owner to say.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(latest(folder))
    None
    """
    folder, together = absolute(folder), _together()
    there = together.first_does(lambda: _candidates(folder))
    for number, complete in reversed(there):
        path = folder / str(number)
        try:
            if not complete:
                raise _manifest.damaged(path, "its save was not finished")
            return _verified_at(path, together)
        except DamagedCheckpointError as error:
            if complete and _is_deleted(path, together):
                return latest(folder)
            if together.first:
                text = f"passed over checkpoint {number} of {folder}: {error.got}"
                warn(text, CheckpointWarning)
    if damaged := [str(number) for number, complete in there if complete]:
        raise DamagedCheckpointError(
            wanted=f"a good checkpoint in {folder}",
            got=f"none that is not damaged: {', '.join(damaged)}",
            do="Put back a copy; to begin anew, move these away or choose another folder.",
        )
    return None


def listed(folder: Path) -> list[Checkpoint]:
    """The checkpoints with a manifest that is whole, the oldest first."""
    found = []
    for number in _folder.numbers(folder):
        try:
            found.append(_manifest.read(folder / str(number)))
        except DamagedCheckpointError:
            continue
    return found


def verify_alone(path: Path) -> Checkpoint:
    """A checkpoint all of whose files were compared with their digests, by this process alone."""
    checkpoint = _manifest.read(path)
    _raise_faults(path, _files.faults(path, checkpoint.files))
    return dataclasses.replace(checkpoint, verified=True)


def restore(
    where: str | Path | Checkpoint,
    like: Any,
    *,
    number: int | None = None,
    only: str = "",
    cast: str | Sequence[str] = (),
    optimizer: Any = None,
) -> Any:
    """A pytree like `like` with the arrays of a checkpoint.

    Args:
      where: a folder, of which the newest good checkpoint is restored; or a `Checkpoint`.
      like: a pytree of arrays or of `jax.ShapeDtypeStruct`s, whose shardings are those wanted; or a `TrainStep`.
      number: of the checkpoint to be restored, instead of the newest good one.
      only: the first parts of names, "params": of a checkpoint the leaves below are restored, and `like` is that part.
      cast: whose floats may come in another dtype than they were saved in: names of leaves, their first parts
        ("opt_state"), or regular expressions of whole names (".*/mu/.*").
      optimizer: the one that will go on, if `like` is no step: of `multi_steps` it tells how many micro-steps a window
        has.

    Returns: new arrays; those of `like` stay as they are.

    Raises:
      CheckpointError: there is no good checkpoint, or a newer jaxmem or Orbax wrote it.
      DamagedCheckpointError: the one asked for is not what was written.
      CheckpointMismatchError: it holds other leaves, shapes or dtypes; nothing was loaded.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> from jaxmem.checkpoint import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, {"w": jnp.arange(3.0)}, number=7)
    ...     restore(folder, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    ...     restore(folder, jax.ShapeDtypeStruct((3,), jnp.float32), only="w")
    {'w': Array([0., 1., 2.], dtype=float32)}
    Array([0., 1., 2.], dtype=float32)
    """
    checkpoint, parts = _chosen(where, number), only.split("/") if only else []
    like = functools.reduce(lambda below, part: {part: below}, reversed(parts), like)
    like, reading = fitting(checkpoint, like, only=only, cast=cast, optimizer=optimizer)
    for note in reading.notes:
        _LOG.info(note)
    _LOG.info("reading checkpoint %d, %s", checkpoint.number, format_bytes(checkpoint.size_bytes))
    from jaxmem.checkpoint import _orbax, _read  # a second to load, which who only imports jaxmem does not pay

    def read() -> Any:
        try:
            with _orbax.quiet(), jax.transfer_guard("allow"):  # which a user may forbid; here it is asked for
                return _read.read(checkpoint.path / _folder.STATE, reading, like)
        except Exception as error:
            told = _errors.unreadable(error, checkpoint.path, checkpoint.versions.get("orbax-checkpoint"))
            if told is None:
                raise
            raise told from error

    return functools.reduce(lambda tree, part: tree[part], parts, _together().all_do(read))


def fitting(
    checkpoint: Checkpoint, like: Any, *, only: str = "", cast: str | Sequence[str] = (), optimizer: Any = None
) -> tuple[Any, Reading]:
    """The tree to restore, and where its leaves come from; raises as `restore` does where it does not fit."""
    if hasattr(like, "abstract_arguments"):  # a step
        like, optimizer = like.abstract_arguments()[0], like.spec.workload.optimizer
    return like, match(
        _below(checkpoint, only) if only else checkpoint.leaves,
        like,
        cast=cast,
        mid_window=checkpoint.mid_window,
        optimizer=optimizer,
        where=f"checkpoint {checkpoint.path}",
    )


def _below(checkpoint: Checkpoint, only: str) -> dict[str, Leaf]:
    """Name → leaf, of a part of a checkpoint."""
    found = {name: leaf for name, leaf in checkpoint.leaves.items() if f"{name}/".startswith(f"{only}/")}
    if not found:
        first = dict.fromkeys(name.partition("/")[0] for name in checkpoint.leaves)
        raise CheckpointError(
            wanted=f"only to be the first parts of names of checkpoint {checkpoint.path}",
            got=repr(only),
            do=f"Names begin with {', '.join(first)}.",
        )
    return found


def _chosen(where: str | Path | Checkpoint, number: int | None) -> Checkpoint:
    if isinstance(where, Checkpoint):
        if number not in (None, where.number):
            raise CheckpointError(
                wanted=f"number={where.number}, or none, with a Checkpoint", got=f"{number!r}", do="Pass a folder."
            )
        return where if where.verified else _verified(where, _together())
    folder = absolute(where)
    if number is not None:
        together = _together()
        there = [each for each, _ in together.first_does(lambda: _candidates(folder))]
        if number not in there:
            raise _none(folder, f"checkpoint {number}", f"those of {there}" if there else "none")
        return _verified_at(folder / str(number), together)
    found = latest(folder)
    if found is None:
        raise _none(folder, "a good checkpoint", "none")
    return found


def _candidates(folder: Path) -> list[tuple[int, bool]]:
    """(number, whether it has a manifest) of what lies in a folder, without what is being written."""
    try:
        found, there = None, []
        while found != (found := _folder.numbers(folder)):  # a run may complete one and delete another meanwhile
            _folder.check(folder)
            there = [(number, _folder.has_manifest(folder / str(number))) for number in found]
    except OSError as error:
        raise _errors.explained(error, "a folder with checkpoints", folder) from error
    written = not all(complete for _, complete in there) and _folder.is_held(folder)
    return [(number, complete) for number, complete in there if complete or not written]


def _is_deleted(path: Path, together: Together) -> bool:
    """Whether the run that writes there has deleted a checkpoint since it was found; then there is a newer one."""
    return together.first_does(lambda: not _folder.has_manifest(path))


def _verified_at(path: Path, together: Together) -> Checkpoint:
    return _verified(together.all_do(lambda: _manifest.read(path)), together)


def _verified(checkpoint: Checkpoint, together: Together) -> Checkpoint:
    size = format_bytes(checkpoint.size_bytes)
    _LOG.info("verifying checkpoint %d, %s", checkpoint.number, size)
    mine = _files.share(checkpoint.files, together.process, together.processes)
    said = together.gather(_files.faults(checkpoint.path, mine))
    _raise_faults(checkpoint.path, [fault for found in said for fault in found])
    return dataclasses.replace(checkpoint, verified=True)


def _raise_faults(path: Path, found: list[str]) -> None:
    if found:
        DAMAGED.add(path)
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise _manifest.damaged(path, "; ".join(found[:_MOST_NAMED]) + more)


def _none(folder: Path, wanted: str, got: str) -> CheckpointError:
    return CheckpointError(wanted=f"{wanted} in {folder}", got=got, do="Look at the path, or train first.")


def _together() -> Together:
    return Together(f"restore/{next(_COUNT)}")
