"""What the TPU compiler and the TPU runtime say."""

import functools
import re

from jaxmem.analysis.oom._formats import Headline, number
from jaxmem.analysis.oom._records import MemoryName


def _space(match: re.Match) -> MemoryName:
    space = (match["space"] or "hbm").lower()
    return "vmem" if space == "vmem" else "smem" if space == "smem" else "hbm"


_compile = functools.partial(Headline, backend="tpu", memory="hbm", when="compile", memory_of=_space)
_run = functools.partial(Headline, backend="tpu", memory="hbm", when="run")

HEADLINES = (
    _compile(
        kind="tpu_compile",
        trigger="Ran out of memory in memory space",
        pattern=re.compile(r"Ran out of memory in memory space (?P<space>[a-z]{1,10})"),
    ),
    _compile(
        kind="tpu_compile",
        trigger="Ran out of memory on HBM",
        pattern=re.compile(r"Ran out of memory on (?P<space>HBM), the total memory"),
    ),
    _compile(
        kind="tpu_scoped",
        trigger="Scoped allocation with size",
        pattern=re.compile(
            r"Scoped allocation with size [^ ]{1,20} and limit [^ ]{1,20} exceeded scoped "
            r"(?P<space>\w{1,10})"
        ),
    ),
    _compile(
        kind="tpu_scoped",
        trigger="would exceed memory (size=",
        pattern=re.compile(
            r"Allocation \(size=\d{1,20}\) would exceed memory \(size=\d{1,20}\)"
            r"(?:.{0,400}?space=(?P<space>\w{1,10}))?"
        ),
    ),
    _run(
        kind="tpu_run",
        trigger="Attempting to allocate",
        pattern=re.compile(r"Attempting to allocate \d[^ ]{0,20}\. That was not possible"),
    ),
    _run(
        kind="tpu_load",
        trigger="Attempting to reserve",
        pattern=re.compile(r"Attempting to reserve \d[^ ]{0,20} at the bottom of memory"),
    ),
)

NUMBERS = (
    number("used", r"Used SIZE of \S{1,20} \w{1,10}"),
    number("limit", r"Used \S{1,20} of SIZE \w{1,10}"),
    number("exceeded", r"Exceeded \w{1,10} capacity by SIZE"),
    number("used", r"total memory required for HLO temporaries \(SIZE\)"),
    number("limit", r"exceeds available HBM \(SIZE\)"),
    number("requested", r"Scoped allocation with size SIZE"),
    number("limit", r"Scoped allocation with size \S{1,20} and limit SIZE"),
    number("exceeded", r"exceeded scoped \w{1,10} limit by SIZE"),
    number("requested", r"Allocation \(size=SIZE\) would exceed"),
    number("limit", r"would exceed memory \(size=SIZE\)"),
    number("requested", r"Attempting to (?:allocate|reserve) SIZE"),
    number("free", r"There are SIZE free"),
    number("largest_free", r"largest contiguous region of free memory is SIZE"),
    number("reservable", r"reserved, and SIZE reservable"),
    number("limit", r"HBM capacity SIZE:"),
    number("allocated", r"Currently allocated: {1,30}SIZE"),
    number("total", r"Total \w{1,10} usage >= SIZE"),
    number("reserved", r"^\W{0,40}reserved {1,30}SIZE"),
    number("program", r"^\W{0,40}program {1,30}SIZE"),
    number("arguments", r"^\W{0,40}arguments {1,30}SIZE"),
    number("outputs", r"Output size SIZE"),
    number("global", r"^\W{0,40}global {1,30}SIZE"),
    number("scoped", r"^\W{0,40}scoped {1,30}SIZE"),
    number("temporaries", r"HLO temp {1,30}SIZE"),
    number("fragmentation", r"fragmentation \(SIZE\)"),
)

PROGRAMS = (
    re.compile(r"would exceed memory \(size=\d{1,20}\) :: .{0,500}?\] :: ([\w.]{1,200})"),
    re.compile(r"HLO module: ([\w.<>\-]{1,200}?)[.]?(?:\s|$)"),
    re.compile(r"Error loading program '([^']{1,200})'"),
)
