"""What XLA on the CPU, Python, the kernel and batch systems say about the host's memory."""

import functools
import re

from jaxmem.analysis.oom._formats import Headline, number

_cpu = functools.partial(Headline, backend="cpu", memory="host", when="run")
_host = functools.partial(Headline, backend="host", memory="host", when="run")
_EXIT = re.compile(r"(?:[Ee]xit|[Rr]eturn)\w{0,4} ?(?:with|non-zero exit)? ?(?:code|status):? 137\b")

HEADLINES = (
    _cpu(
        kind="cpu_xla",
        trigger="Out of memory allocating",
        pattern=re.compile(r"Out of memory allocating \d{1,20} bytes"),
    ),
    _host(
        kind="python_memory",
        trigger="Unable to allocate",
        pattern=re.compile(r"Unable to allocate \d[\d.]{0,20} ?\w{1,6} for an array with shape"),
    ),
    _host(
        kind="python_memory",
        trigger="MemoryError",
        pattern=re.compile(r"(?:^|[\s\].])(?:_Array)?MemoryError(?::|\s{0,4}$)"),
    ),
    _host(
        kind="cpp_memory",
        trigger="std::bad_alloc",
        pattern=re.compile(r"std::bad_alloc"),
    ),
    _host(
        kind="kernel_cgroup",
        trigger="emory cgroup out of memory",
        pattern=re.compile(r"[Mm]emory cgroup out of memory"),
    ),
    _host(
        kind="kernel_kill",
        trigger="ut of memory: Kill",
        pattern=re.compile(r"(?<!group )[Oo]ut of memory: Kill(?:ed)? process \d"),
    ),
    _host(
        kind="slurm",
        trigger="oom-kill event",
        pattern=re.compile(r"oom-kill event"),
    ),
    _host(
        kind="slurm",
        trigger="oom_kill event",
        pattern=re.compile(r"oom_kill event"),
    ),
    _host(
        kind="container",
        trigger="OOMKilled",
        pattern=re.compile(r"\bOOMKilled\b(?!\W{1,4}false)"),
    ),
    _host(
        kind="killed",
        trigger="Killed",
        pattern=re.compile(r"(?:^|line \d{1,9}: {1,8}\d{1,9} |\d{1,9} )Killed(?: {2,60}\S|\s{0,40}$)"),
    ),
    _host(
        kind="killed",
        trigger="code 137",
        pattern=_EXIT,
    ),
    _host(
        kind="killed",
        trigger="status 137",
        pattern=_EXIT,
    ),
    _host(
        kind="killed",
        trigger="code: 137",
        pattern=_EXIT,
    ),
)

NUMBERS = (
    number("requested", r"Out of memory allocating SIZE"),
    number("requested", r"Unable to allocate SIZE for an array"),
    number("resident", r"anon-rss:SIZE"),
    number("virtual", r"total-vm:SIZE"),
    number("limit", r"memory: usage \S{1,30}, limit SIZE"),
)

PROGRAMS = (re.compile(r"Kill(?:ed)? process \d{1,10} \(([^)]{1,64})\)"),)
