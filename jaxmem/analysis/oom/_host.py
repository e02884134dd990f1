"""What XLA on the CPU, Python, the kernel and batch systems say about the host's memory."""

import functools
import re

from jaxmem.analysis.oom._formats import Headline, number

_cpu = functools.partial(Headline, backend="cpu", memory="host", when="run")
_host = functools.partial(Headline, backend="host", memory="host", when="run")
# "exit code 137", "Exit Code:    137", "exited with 137", docker's "Exited (137)", "returned 137", "returncode=137".
# Nothing is given back (`?+`), since whole logs of "exited with code 1" have to pass quickly.
_STATUS = (
    r"(?:ed|s)?+(?: with)?+(?: exit| an exit| a)?+(?:[ _\-]?[Cc]ode|[ _\-]?[Ss]tatus)?+[\"']?+"
    r" {0,8}+[:=]?+ {0,8}+\(?+(?<=[ =:(])137\b"
)
_COUNTED = r"(?! (?:errors?|failures?|warnings?|tests?|problems?|issues?|items?|results?|rows?|values?)\b)"

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
        pattern=re.compile(
            r"MemoryError(?:(?<=^MemoryError)|(?<=[\s\].]MemoryError)|"
            r"(?<=^_ArrayMemoryError)|(?<=[\s\].]_ArrayMemoryError))(?::|[ \t]{0,4}$)"
        ),
    ),
    _host(
        kind="cpp_memory",
        trigger="std::bad_alloc",
        pattern=re.compile(r"std::bad_alloc"),
    ),
    _host(
        kind="kernel_cgroup",
        trigger="emory cgroup out of memory",
        pattern=re.compile(r"emory cgroup out of memory"),
    ),
    _host(
        kind="kernel_kill",
        trigger="ut of memory: Kill",
        pattern=re.compile(r"ut of memory: Kill(?<!group out of memory: Kill)(?:ed)? process \d"),
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
        pattern=re.compile(r"OOMKilled(?<=\bOOMKilled)\b(?!\W{1,4}false)"),
    ),
    _host(
        kind="killed",
        trigger="Killed",
        # a shell's "line 3: 1234 Killed   python train.py" too
        pattern=re.compile(r"Killed(?:(?<=^Killed)|(?<=\d Killed))(?: {2,60}\S|[ \t]{0,40}$)"),
    ),
    _host(
        kind="killed",
        trigger="137",
        pattern=re.compile(r"xit(?<=[Ee]xit)" + _STATUS + _COUNTED),
    ),
    _host(
        kind="killed",
        trigger="137",
        pattern=re.compile(r"eturn(?<=[Rr]eturn)" + _STATUS + _COUNTED),
    ),
    _host(
        kind="nccl_shm",
        trigger="/dev/shm/nccl",
        pattern=re.compile(
            r"/dev/shm/nccl[\w\-]{0,60} to \d{1,20} bytes|"
            r"/dev/shm/nccl[^\n]{0,200}(?:No space left on device|Cannot allocate memory)"
        ),
    ),
    _host(
        kind="cpp_memory",
        trigger="Failed to malloc",
        pattern=re.compile(r"Failed to malloc \d"),  # NCCL's own
    ),
)

NUMBERS = (
    number("requested", r"Out of memory allocating SIZE"),
    number("requested", r"Unable to allocate SIZE for an array"),
    number("requested", r"/dev/shm/nccl[\w\-]{0,60} to SIZE"),
    number("requested", r"Failed to malloc SIZE"),
    number("resident", r"anon-rss:SIZE"),
    number("virtual", r"total-vm:SIZE"),
    number("limit", r"memory: usage \S{1,30}, limit SIZE"),
)

PROGRAMS = (re.compile(r"Kill(?:ed)? process \d{1,10} \(([^)]{1,64})\)"),)
