"""Makes the buffers of a report of what the compiler assigned: what each holds, and where that was computed."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jaxmem._scopes import ACCUMULATE_SCOPE
from jaxmem.analysis._records import Buffer
from jaxmem.analysis.assignment import Allocation, Value, logical_bytes, padded_bytes
from jaxmem.analysis.attribution._frames import Frame, Frames
from jaxmem.analysis.attribution._kinds import COPIES, Argument, Kinds
from jaxmem.analysis.attribution._origin import Origin, origin
from jaxmem.analysis.attribution._scopes import NO_SCOPE, parse_scope
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import parse_shape

_OF_MODULES = ("parameters", "optimizer_state", "state", *COPIES)
_KEY = re.compile(r"\['([^']+)'\]|\.(\w+)|\[(\w+)\]")


class Buffers:
    """Makes a `Buffer` of what the compiler assigned.

    Args:
      module: the optimised HLO, and `text` what it was read from.
      arguments: of the program, by their number.
      names: of saved values, by source line and number of elements.
      schedule: instruction names in the order in which they run.

    `origins` are those of the temporaries made so far, by the buffer's name.
    """

    def __init__(
        self,
        module: Module,
        text: str,
        arguments: dict[int, Argument],
        names: Mapping[tuple[str, int], str],
        schedule: Sequence[str],
    ):
        self.names, self.schedule = names, schedule
        self.module, self.frames = module, Frames(text)
        self.arguments, self.kinds = arguments, Kinds(arguments, self.module)
        self.origins: dict[str, Origin] = {}

    def temporary(self, value: Value) -> Buffer:
        place = {
            "name": _value_name(value),
            "layout": value.layout,
            "size_bytes": value.size_bytes,
            "allocation": value.allocation,
            "offset_bytes": value.offset_bytes,
            "start": value.start,
            "end": value.end,
        }
        if value.layout.startswith("("):  # the table of addresses that a tuple is
            return Buffer(**place, kind="workspace", op="tuple", shape="tuple")
        own = self.module.instruction(value.name)
        if own is not None:
            found = origin(self.module, value.name, value.index)
        else:  # made inside an asynchronous computation, of which the text shows only the start
            start = self.schedule[value.start] if 0 <= value.start < len(self.schedule) else ""
            own = self.module.instruction(start)
            found = origin(self.module, start, (1, *value.index))
        if found:
            self.origins[_value_name(value)] = found
        scope = parse_scope(found.instruction.op_name) if found else None
        kind = self.kinds.of(own, found, scope, value.layout)
        said = scope if scope and found and found.instruction.opcode != "parameter" else NO_SCOPE
        path = ""
        copied = self.kinds.copied(found) if found else None
        if copied is not None:
            path = copied.path
        elif found and found.instruction.opcode == "parameter":
            path = found.instruction.argument_path
        elif kind in ("gradients", "accumulators"):
            path = self.kinds.parameter_path(parse_shape(value.layout), said.layer)
        frame = self.frames.of(found.instruction.rest) if found else None
        if found and said.op and (not said.layer or kind == "accumulators"):
            said = said._replace(layer=self._layer(found, kind, frame) or said.layer)
            if kind == "accumulators":
                path = self.kinds.parameter_path(parse_shape(value.layout), said.layer)
        return Buffer(
            **place,
            kind=kind,
            layer=said.layer,
            phase=said.phase,
            path=path,
            saved_name=self.names.get((f"{frame.file}:{frame.line}", math.prod(parse_shape(value.layout))), "")
            if frame and kind == "activations" and said.phase == "forward"
            else "",
            op=said.op or (f"copy of {found.instruction.opcode}" if found else ""),
            op_name=found.instruction.op_name if found else (own.op_name if own else ""),
            source=str(frame or ""),
            source_file=frame.file if frame else "",
            function=frame.function if frame else "",
            shape=value.layout.split("{")[0],
            padding_bytes=_padding(value.layout),
        )

    def _layer(self, found: Origin, kind: str, frame: Frame | None) -> str:
        """The layer where no scope names it: of an accumulator its gradient's, else the user's classes, or the scan."""
        instruction = found.instruction
        if kind == "accumulators":
            for number in range(len(instruction.operands)):
                added = self.module.operand(instruction, number)
                made = origin(self.module, added.name) if added else None
                scope = parse_scope(made.instruction.op_name) if made else NO_SCOPE
                if made is None or ACCUMULATE_SCOPE in made.instruction.op_name:
                    continue  # the accumulator itself
                if scope.phase == "backward":
                    return scope.layer or self.frames.modules(made.instruction.rest)
            return ""
        layer = self.frames.modules(instruction.rest)
        if not layer and "/while/body/" in instruction.op_name:
            layer = f"scan({frame.function.rpartition('.')[2]})" if frame and frame.function else "scan"
        return layer

    def resident(self, allocation: Allocation, length: int) -> Buffer:
        """An argument or an output: alive from the first position to the last."""
        argument = self.arguments.get(allocation.parameter) if allocation.parameter is not None else None
        value = max(allocation.values, key=lambda v: v.size_bytes, default=None)
        layout = argument.type if argument else (value.layout if value else "")
        shape = "tuple" if layout.startswith("(") else layout.split("{")[0]
        return Buffer(
            name=_value_name(value) if value else f"allocation {allocation.number}",
            kind=argument.kind if argument else "outputs",
            layer="",
            path=argument.path if argument else "",
            op="parameter" if argument else "output",
            shape=shape,
            layout=layout,
            size_bytes=allocation.size_bytes,
            padding_bytes=_padding(layout),
            allocation=allocation.number,
            start=0,
            end=max(0, length - 1),
        )


def _padding(layout: str) -> int:
    """Bytes of an array that its tiles add."""
    return max(0, padded_bytes(layout) - logical_bytes(layout))


def _value_name(value: Value) -> str:
    return f"{value.name}{{{','.join(map(str, value.index))}}}" if value.index else value.name


def rooted(buffers: list[Buffer]) -> list[Buffer]:
    """Layers under one root: arguments get theirs from their path, below the module that most layers share.

    The compiler loses that module's name here and there.
    """
    keys = {key for b in buffers if b.path for key in _keys(b.path)[:1]}
    sizes: dict[str, int] = {}
    for buffer in buffers:
        first = buffer.layer.split("/")[0]
        if first and first not in keys:
            sizes[first] = sizes.get(first, 0) + buffer.size_bytes
    root = max(sizes, key=sizes.__getitem__, default="")
    named = []
    for buffer in buffers:
        names = buffer.layer.split("/") if buffer.layer else []
        if not names and buffer.path and buffer.kind in _OF_MODULES:
            names = _keys(buffer.path)[:-1]
        if root and names and names[0] in keys:
            names = [root, *names]
        named.append(dataclasses.replace(buffer, layer="/".join(names)) if names else buffer)
    return named


def _keys(path: str) -> list[str]:
    """The dictionary keys of a path: those of modules, not of the records that hold them.

    >>> _keys("state.opt_state[1][0].mu['blocks']['mlp_in']['kernel']")
    ['blocks', 'mlp_in', 'kernel']
    """
    return [key for key, _, _ in _KEY.findall(path) if key]
