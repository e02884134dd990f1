"""The lists of the largest buffers: of the TPU compiler, of XLA's buffer assignment, and of a GPU's allocator."""

import re
from collections.abc import Sequence

from jaxmem._units import SIZE, size_in
from jaxmem.analysis.attribution import parse_scope
from jaxmem.analysis.oom._lines import Line
from jaxmem.analysis.oom._records import OomBuffer

MOST_BUFFERS = 100
CHUNKS = "chunks of the pool"
"""The allocation of what a GPU's allocator lists: all that JAX holds, not the program's buffers."""

_START = re.compile(r"(?:^\s?|\s\s|\b\d{1,4}\. )Size: {1,4}(\S{1,30})")
_CHUNKS = re.compile(rf"\b(\d{{1,9}}) Chunks of size (\d{{1,19}}) totalling {SIZE}")
_ON_CHIP = re.compile(
    r"\[shape = '(\w{1,12}\[[\d,]{0,200}\])[^']{0,100}', space=\w{1,10}, "
    r"size = (0x[0-9a-f]{1,15}).{0,40}?tag = '([^']{1,60})'"
)
_KEYS = {
    "op_name": re.compile(r'op_name="([^"]{1,4000})'),
    "source_file": re.compile(r'source_file="([^"]{1,1000})"'),
    "source_line": re.compile(r"source_line=(\d{1,9})"),
    "shape": re.compile(r"(?:Shape|Subshape): {1,4}(\w{1,12}\[[\d,<= ]{0,200}\])"),
    "unpadded": re.compile(r"Unpadded size: {1,4}(\S{1,30})"),
    "padding": re.compile(r"Extra memory due to padding: {1,4}(\S{1,30})"),
    "label": re.compile(r"XLA [Ll]abel: {1,4}(.{1,300})"),
    "allocation": re.compile(r"Allocation type: {1,4}([\w \-]{1,60})"),
}


def buffers_in(lines: Sequence[Line]) -> tuple[OomBuffer, ...]:
    """The buffers that `lines` list; largest first, at most `MOST_BUFFERS`."""
    found: list[OomBuffer] = []
    chunks: list[OomBuffer] = []
    current: dict[str, str] = {}
    at = 0

    def close():
        if current and len(found) < MOST_BUFFERS and (buffer := _buffer(current, at)) is not None:
            found.append(buffer)
        current.clear()

    for line_number, _, line, _ in lines:
        if (match := _CHUNKS.search(line)) and (size := size_in(match, 3)):
            label = f"{match[1]} of {match[2]} bytes"
            chunks.append(OomBuffer(size_bytes=size, label=label, allocation=CHUNKS, line=line_number))
        if len(found) < MOST_BUFFERS and (match := _ON_CHIP.search(line)):
            size = int(match[2], 16)
            found.append(OomBuffer(size_bytes=size, shape=match[1], allocation=match[3], line=line_number))
        if match := _START.search(line):
            close()
            at, current["size"] = line_number, match[1]
        elif "=====" in line:
            close()
        if not current:
            continue
        for key, pattern in _KEYS.items():
            if key not in current and (match := pattern.search(line)):
                current[key] = match[1]
        if "Entry Parameter" in line:
            current["allocation"] = "argument"
    close()
    return tuple(sorted(found or chunks, key=lambda buffer: -buffer.size_bytes)[:MOST_BUFFERS])


def _buffer(values: dict[str, str], line: int) -> OomBuffer | None:
    size, padding = (_size(values.get(key, "")) for key in ("size", "padding"))
    if not size:
        return None
    path = values.get("source_file", "").replace("\\", "/")
    source = f"{path.rpartition('/')[2]}:{values['source_line']}" if path and "source_line" in values else ""
    op_name = values.get("op_name", "")
    return OomBuffer(
        size_bytes=size,
        padding_bytes=min(padding, size),
        shape=values.get("shape", ""),
        op_name=op_name,
        layer=layer_of(op_name),
        source=source,
        source_file=path,
        label=values.get("label", "").strip(),
        allocation=values.get("allocation", "").strip(),
        line=line,
    )


def _size(text: str) -> int:
    match = re.match(SIZE, text)
    return (size_in(match) or 0) if match else 0


def layer_of(op_name: str) -> str:
    """The module path in a scope path, behind which older texts write the operation's parameters in brackets.

    >>> layer_of("jit(step)/jit(main)/transpose(jvp(GPT))/while/body/mlp/dot_general[precision=None]")
    'GPT/mlp'
    """
    return parse_scope(op_name.partition("[")[0]).layer


_PROGRAMS = re.compile(
    r"HLO module: ([\w.<>\-]{1,200}?)[.]?(?:\s|$)"
    r"|Error loading program '([^']{1,200})'"
    r"|[Ee]xecut(?:ion of|ing|able) (?:module|program) '?(jit_[\w.]{1,200})"
    r"|would exceed memory \(size=\d{1,20}\) :: .{0,500}?\] :: ([\w.]{1,200})"
    r"|Kill(?:ed)? process \d{1,10} \(([^)]{1,64})\)"
)


def program_in(lines: Sequence[Line]) -> str:
    """The program, or process, that the text names; "" where it names none."""
    found = next((match for line in lines if (match := _PROGRAMS.search(line.text))), None)
    return next(filter(None, found.groups()), "") if found else ""
