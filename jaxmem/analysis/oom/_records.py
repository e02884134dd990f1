"""What an out-of-memory text says, as plain records."""

import dataclasses
from typing import Any, Literal

from jaxmem._shown import Brief, JsonRecord

MemoryName = Literal["hbm", "host", "vmem", "smem"]
Backend = Literal["tpu", "gpu", "cpu", "host"]
When = Literal["compile", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OomFact(Brief):
    """A number that stands in the text.

    Args:
      name: "requested", "used", "limit", "free", "exceeded", "arguments", "temporaries", ...
      size_bytes: the number; texts in G or GiB are rounded, so it may be a few MiB off.
      line: number of the line in the text, from 1.
      quote: the words it was read from.
    """

    name: str
    size_bytes: int
    line: int
    quote: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OomBuffer(Brief):
    """A buffer that the text lists; what the text does not say is empty.

    Args:
      size_bytes: bytes that it occupies, of which `padding_bytes` hold nothing.
      shape: "f32[8,1024,768]".
      op_name: JAX's scope path; `layer` is the modules in it.
      source: "gpt.py:51"; `source_file` its whole path.
      label: the instruction of the optimised program, or its opcode.
      allocation: "HLO temp", "argument", ... in the words of the text.
      line: number of its first line in the text.
    """

    size_bytes: int
    padding_bytes: int = 0
    shape: str = ""
    op_name: str = ""
    layer: str = ""
    source: str = ""
    source_file: str = ""
    label: str = ""
    allocation: str = ""
    line: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OomAdvice(Brief):
    """Something to try.

    Args:
      title: one line.
      how: what to change.
      saves_bytes: an estimate from the listed buffers; None where the text does not tell.
      because: the evidence, with line numbers.
    """

    title: str
    how: str
    saves_bytes: int | None = None
    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OomExplanation(
    JsonRecord, identity=("backend", "memory", "when", "requested_bytes", "limit_bytes", "program", "headline")
):
    """The out-of-memory that ended the program.

    Args:
      kind: name of the format that it was read as: "tpu_compile", "gpu_bfc", ...
      backend, memory, when: whose memory ran out, and at what time.
      requested_bytes: of the allocation that failed; `used_bytes`: needed or in use in all;
        `limit_bytes`: all there is; `free_bytes`: left. None where the text does not say.
      program: the jitted function, where it is named.
      headline: the line that says it; `line` is its number.
      where: innermost line of the user's own code in the Python traceback before or after it.
      facts, buffers: what was read, buffers largest first.
      advice: what to try, the most promising first.
      repeats: further lines that report the same; `others`: other out-of-memories in the text.
      notes: what the text leaves open.
    """

    kind: str
    backend: Backend
    memory: MemoryName
    when: When
    requested_bytes: int | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None
    program: str = ""
    headline: str
    line: int
    where: str = ""
    facts: tuple[OomFact, ...] = ()
    buffers: tuple[OomBuffer, ...] = ()
    advice: tuple[OomAdvice, ...] = ()
    repeats: int = 0
    others: int = 0
    notes: tuple[str, ...] = ()

    @property
    def missing_bytes(self) -> int | None:
        """Bytes short: what is needed less what there is; None where the text does not tell."""
        exceeded = next((fact.size_bytes for fact in self.facts if fact.name == "exceeded"), None)
        if exceeded is not None:
            return exceeded
        if self.used_bytes is not None and self.limit_bytes is not None and self.used_bytes > self.limit_bytes:
            return self.used_bytes - self.limit_bytes
        available = self.free_bytes if self.free_bytes is not None else self.limit_bytes
        if self.requested_bytes is not None and available is not None:
            return max(self.requested_bytes - available, 0)
        return None

    @property
    def requested_buffer(self) -> OomBuffer | None:
        """The first listed buffer of the requested size, as closely as the text writes sizes."""
        wanted = self.requested_bytes or 0
        return next((b for b in self.buffers if abs(b.size_bytes - wanted) * 200 <= wanted), None)

    def to_dict(self) -> dict[str, Any]:
        """All fields, `missing_bytes` and `requested_buffer`, as JSON values."""
        asked = self.requested_buffer
        more = {"missing_bytes": self.missing_bytes, "requested_buffer": asked and dataclasses.asdict(asked)}
        return {**dataclasses.asdict(self), **more}
