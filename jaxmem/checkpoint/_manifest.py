"""`Checkpoint`: what is known of a checkpoint before an array of it is read, and the file that says so."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem._installed import version
from jaxmem._shown import Brief
from jaxmem.checkpoint._leaves import Leaf
from jaxmem.errors import CheckpointError, DamagedCheckpointError

FORMAT = 1
NAME, UNFINISHED = "checkpoint.json", "checkpoint.json.new"
PACKAGES = ("jaxmem", "jax", "flax", "optax", "orbax-checkpoint")

# A manifest is JSON that ends with the digest of what stands before it, in this and in every later format: only then
# is "format" to be believed.
_DIGEST = b',\n"sha256": "%s"\n}\n'
_DIGEST_START = _DIGEST.partition(b"%s")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Brief, identity=("number", "path")):
    """A complete checkpoint.

    Args:
      number: of the window after which it was saved, or what `save` was given.
      path: of its folder.
      leaves: name → what is known of the array.
      record: JSON that was saved with it.
      metrics: those it was saved with.
      versions: of the packages that wrote it.
      processes: how many wrote it.
      mid_window: what is known of accumulation windows that were not at their end.
      files: name below `path` → its size in bytes and its sha256.
      verified: whether all files were found to be what was written, before this object was made.
    """

    number: int
    path: Path
    leaves: Mapping[str, Leaf]
    record: Mapping[str, Any]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    processes: int = 1
    mid_window: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    verified: bool = False

    @property
    def size_bytes(self) -> int:
        """Of all its files, without the manifest."""
        return sum(size for size, _ in self.files.values())


_SAVED = tuple(field.name for field in dataclasses.fields(Checkpoint) if field.name not in ("path", "verified"))


def write(checkpoint: Checkpoint) -> None:
    """Writes the manifest, which makes the checkpoint a complete one; nothing of it is seen before all of it is."""
    body = {"format": FORMAT} | {name: getattr(checkpoint, name) for name in _SAVED}
    body["leaves"] = {name: dataclasses.asdict(leaf) for name, leaf in checkpoint.leaves.items()}
    text = json.dumps(body, indent=1).encode()
    path = checkpoint.path / NAME
    new = path.with_name(UNFINISHED)
    with open(new, "wb") as file:
        file.write(_sealed(text.removesuffix(b"\n}")))
        file.flush()
        os.fsync(file.fileno())
    for folder in {(checkpoint.path / name).parent for name in checkpoint.files}:
        sync_folder(folder)  # the files themselves are on disk since they were read for their digests
    os.replace(new, path)
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, by its manifest; the other files are not looked at.

    Raises:
      DamagedCheckpointError: there is no manifest, another than was written, or that of another number.
      CheckpointError: a newer jaxmem wrote it.
    """
    try:
        content = (path / NAME).read_bytes()
    except FileNotFoundError as error:
        raise damaged(path, f"no {NAME}, so the save was not finished") from error
    except OSError as error:
        raise damaged(path, f"a {NAME} that cannot be read: {error.strerror}") from error
    head = content.rpartition(_DIGEST_START)[0]
    if not head or _sealed(head) != content:
        raise damaged(path, f"a {NAME} that is damaged: its own digest is another")
    body = json.loads(content)
    if body["format"] > FORMAT:
        raise CheckpointError(
            wanted=f"a checkpoint in format {FORMAT}, which jaxmem {version('jaxmem')} reads",
            got=f"format {body['format']} in {path}, written by jaxmem {body.get('versions', {}).get('jaxmem')}",
            do="Install that version of jaxmem, or a newer one.",
        )
    if path.name.isdecimal() and path.name != str(body["number"]):
        raise damaged(path, f"the {NAME} of checkpoint {body['number']}")
    body["leaves"] = {
        name: Leaf(**fields | {"shape": tuple(fields["shape"])}) for name, fields in body["leaves"].items()
    }
    body["files"] = {name: (size, digest) for name, (size, digest) in body["files"].items()}
    return Checkpoint(path=path, **{name: body[name] for name in _SAVED})


def sync_folder(path: Path) -> None:
    """Puts on disk which names a folder has; not every file system can, and then its own order has to do."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _sealed(head: bytes) -> bytes:
    return head + _DIGEST % hashlib.sha256(head).hexdigest().encode()


def damaged(path: Path, got: str) -> DamagedCheckpointError:
    """The error for a checkpoint that is not whole."""
    return DamagedCheckpointError(
        wanted=f"a complete checkpoint in {path}",
        got=got,
        do="Restore another one: `jaxmem.checkpoint.latest` finds the newest that is good.",
    )
