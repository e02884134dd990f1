"""How many devices a collective of an HLO module joins."""

import math
import re

from jaxmem.analysis.hlo._parse import Instruction, Module

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
# Newer XLA: over axes of a mesh, of which "'a':(1)2" is a part of size 2.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TAKEN = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_PARTITIONS = re.compile(r"(?:num_partitions|replica_count)=(\d+)")


def group_size(instruction: Instruction) -> int | None:
    """Devices that take part in one group; None where the text names none.

    >>> group_size(Instruction("a", "f32[]", "all-reduce", "%x), replica_groups=[2,4]<=[8]", False))
    4
    >>> group_size(Instruction("a", "f32[]", "all-reduce", "%x), replica_groups=mesh['x'=4,'y'=2] {'x'}", False))
    4
    """
    listed = _LISTED.search(instruction.rest)
    if listed:
        return len(listed.group(1).split(","))
    mesh = _MESH.search(instruction.rest)
    if mesh:
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh.group(1))}
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in _TAKEN.findall(mesh.group(2)))
    iota = _IOTA.search(instruction.rest)
    return int(iota.group(1).split(",")[-1]) if iota else None


def device_count(module: Module) -> int:
    """Devices of the program."""
    return math.prod(int(n) for n in _PARTITIONS.findall(module.header))
