"""`Checkpoint`: what is known of a checkpoint before an array of it is read."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem._shown import Brief
from jaxmem.checkpoint._leaves import Leaf

FORMAT = 1
NAME = "checkpoint.json"


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
      mid_window: what `window_facts` says of its windows of `multi_steps`.
    """

    number: int
    path: Path
    leaves: Mapping[str, Leaf]
    record: Mapping[str, Any]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    mid_window: Mapping[str, Mapping[str, int]]


def write(path: Path, *, number, leaves, record, metrics, versions, mid_window) -> None:
    """Writes the manifest, which makes the checkpoint a complete one."""
    fields = {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()}
    body = {"format": FORMAT, "number": number, "leaves": fields, "record": record, "metrics": metrics}
    body |= {"versions": versions, "mid_window": mid_window}
    (path / NAME).write_text(json.dumps(body))


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    body = json.loads((path / NAME).read_text())
    leaves = {name: Leaf(**fields | {"shape": tuple(fields["shape"])}) for name, fields in body["leaves"].items()}
    told = {name: body[name] for name in ("number", "record", "metrics", "versions", "mid_window")}
    return Checkpoint(path=path, leaves=leaves, **told)
