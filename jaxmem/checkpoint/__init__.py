"""Checkpoints on Orbax whose damage is noticed, and which come back under another mesh or dtype."""

from jaxmem.checkpoint._manager import Manager as Manager
from jaxmem.checkpoint._manager import save as save
from jaxmem.checkpoint._manifest import Checkpoint as Checkpoint
from jaxmem.checkpoint._restore import latest as latest
from jaxmem.checkpoint._restore import restore as restore

__all__ = ["Checkpoint", "Manager", "latest", "restore", "save"]
