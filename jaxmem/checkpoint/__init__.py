"""Checkpoints on Orbax whose damage is noticed, and which come back under another mesh or dtype."""

from jaxmem.checkpoint._manager import Manager as Manager
from jaxmem.checkpoint._manager import latest as latest
from jaxmem.checkpoint._manager import restore as restore
from jaxmem.checkpoint._manager import save as save
from jaxmem.checkpoint._manifest import Checkpoint as Checkpoint

__all__ = ["Checkpoint", "Manager", "latest", "restore", "save"]
