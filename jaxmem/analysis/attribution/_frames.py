"""Source lines of an HLO module: the tables of stack frames above its computations."""

import linecache
import re
from typing import NamedTuple

from jaxmem._source import is_library, is_own, short_name
from jaxmem.analysis._records import SourceLine

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_QUOTED = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_FRAME_OF = re.compile(r"stack_frame_id=(\d+)")
_FILE_OF = re.compile(r'source_file="([^"]*)"')
_LINE_OF = re.compile(r"source_line=(\d+)")
_MOST_LINES, _LONGEST_LINE = 1000, 160


class Frame(NamedTuple):
    """A place in Python source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short_name(self.file)}:{self.line}" if self.file else ""


NOWHERE = Frame("", 0, "")


class Frames:
    """Innermost frame of the user's own code, by stack frame id."""

    def __init__(self, text: str):
        tables = _tables(text)
        files = dict(_numbered(tables["FileNames"]))
        functions = dict(_numbered(tables["FunctionNames"]))
        places = {}
        for line in tables["FileLocations"]:
            if found := _LOCATION.match(line):
                number, file, function, at = map(int, found.groups())
                places[number] = Frame(files.get(file, ""), at, functions.get(function, ""))
        self._frames: dict[int, tuple[Frame, int]] = {}
        for line in tables["StackFrames"]:
            if found := _FRAME.match(line):
                number, place, parent = (int(group or 0) for group in found.groups())
                self._frames[number] = (places.get(place, NOWHERE), parent)
        # XLA prints a parent one higher than the id it means; the first frame, which has none, shows it.
        self._shift = self._frames[1][1] if 1 in self._frames else 0
        self._users: dict[int, Frame] = {}

    def of(self, rest: str) -> Frame:
        """The user's frame of an instruction, from the text after its operands."""
        found = _FRAME_OF.search(rest)
        if found:
            return self.user_frame(int(found.group(1)))
        file, line = _FILE_OF.search(rest), _LINE_OF.search(rest)
        return Frame(file.group(1), int(line.group(1)), "") if file and line else NOWHERE

    def modules(self, rest: str) -> str:
        """The user's classes whose `__call__` lead to an instruction, outermost first: "ViT/Block/Attention".

        A layer for frameworks that open no scope for their modules, as flax.nnx.
        """
        found = _FRAME_OF.search(rest)
        at, names, steps = int(found.group(1)) if found else 0, [], 0
        while at in self._frames and steps < 256:
            frame, parent = self._frames[at]
            if is_own(frame.file):  # above stands who asked for the analysis
                break
            owner, _, method = frame.function.rpartition(".")
            if method == "__call__" and not is_library(frame.file):
                names.append(owner.rsplit(".", 1)[-1])
            at, steps = parent - self._shift, steps + 1
        return "/".join(reversed(names))

    def lines(self) -> tuple[SourceLine, ...]:
        """What stands at the user's lines that were asked for, where their files can be read, notebook cells too."""
        places = {(frame.file, frame.line) for frame in self._users.values() if frame.file}
        found = []
        for file, line in sorted(places)[:_MOST_LINES]:
            text = "" if is_library(file) else linecache.getline(file, line).strip()
            if text:
                found.append(SourceLine(file=file, line=line, text=text[:_LONGEST_LINE]))
        return tuple(found)

    def user_frame(self, number: int) -> Frame:
        """The innermost frame outside JAX and its libraries; the innermost of all where there is none."""
        if number not in self._users:
            innermost, chosen, at, steps = NOWHERE, None, number, 0
            while at in self._frames and steps < 256:
                frame, parent = self._frames[at]
                innermost = innermost if innermost.file else frame
                if frame.file and not is_library(frame.file):
                    chosen = frame
                    break
                at, steps = parent - self._shift, steps + 1
            self._users[number] = chosen or innermost
        return self._users[number]


def _tables(text: str) -> dict[str, list[str]]:
    """The lines of each table; they stand before the first computation."""
    tables: dict[str, list[str]] = {name: [] for name in _TABLES}
    current = None
    start = text.find("\nFileNames")
    if start < 0:
        return tables
    for line in _lines(text, start + 1):
        if line in tables:
            current = tables[line]
        elif line and line[0].isdigit() and current is not None:
            current.append(line)
        elif line:
            break
    return tables


def _lines(text: str, start: int):
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].strip()
        start = end + 1


def _numbered(lines: list[str]):
    for line in lines:
        if found := _QUOTED.match(line):
            yield int(found.group(1)), found.group(2)
