"""Values of a program by number: where each is defined, how long it lives, and which share their bytes."""

import dataclasses
import itertools

from jaxmem.analysis.hlo._module import Index, Instruction
from jaxmem.analysis.hlo._types import leaves

Held = dict[Index, int]
"""Per index of an instruction's result, the number of the value there."""


@dataclasses.dataclass(kw_only=True)
class Flow:
    """Values by number, and where they are: filled by `follow`.

    Args:
      schedule: instruction names in the order in which they run.
      names, indices, types: per value, where it is defined, and its HLO type.
      start, end: per value, its first and last position, both included.
      held: what each scheduled instruction's result holds.
      parameters: what the entry's parameters hold; `outputs`, what its root does.
      replaced: numbers that stand for another value; see `value`.
      buffers: per value, another one of the same bytes; see `buffer`.
      operands: per instruction that computes something, what its operands hold.
    """

    schedule: list[str] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    indices: list[Index] = dataclasses.field(default_factory=list)
    types: list[str] = dataclasses.field(default_factory=list)
    start: list[int] = dataclasses.field(default_factory=list)
    end: list[int] = dataclasses.field(default_factory=list)
    held: dict[str, Held] = dataclasses.field(default_factory=dict)
    parameters: dict[int, Held] = dataclasses.field(default_factory=dict)
    outputs: Held = dataclasses.field(default_factory=dict)
    replaced: dict[int, int] = dataclasses.field(default_factory=dict)
    buffers: list[int] = dataclasses.field(default_factory=list)
    operands: dict[str, list[Held]] = dataclasses.field(default_factory=dict)

    def tick(self, instruction: Instruction) -> int:
        """Puts an instruction at the end of the schedule; returns its position."""
        self.schedule.append(instruction.name)
        return len(self.schedule) - 1

    def define(self, instruction: Instruction, position: int, passed_on: Held | None = None) -> Held:
        """New values at every index of a result, except where it holds what it was given."""
        held = passed_on or {}
        return {
            index: held[index] if index in held else self.new(instruction.name, index, type_, position)
            for index, type_ in leaves(instruction.type)
        }

    def new(self, name: str, index: Index, type_text: str, position: int) -> int:
        """A new value, alive at `position` only."""
        number = len(self.names)
        self.names.append(name)
        self.indices.append(index)
        self.types.append(type_text)
        self.start.append(position)
        self.end.append(position)
        self.buffers.append(number)
        return number

    def value(self, number: int) -> int:
        """The value that a number stands for: what a loop passes on unchanged is what it was given."""
        while number in self.replaced:
            number = self.replaced[number]
        return number

    def buffer(self, number: int) -> int:
        """The number that all values of one buffer have in common."""
        number = self.value(number)
        while self.buffers[number] != number:
            self.buffers[number] = self.buffers[self.buffers[number]]
            number = self.buffers[number]
        return number

    def share(self, one: int, other: int) -> None:
        """Two values that must be the same bytes."""
        self.buffers[self.buffer(one)] = self.buffer(other)

    def use(self, number: int, position: int) -> None:
        """A value is read at a position."""
        number = self.value(number)
        self.end[number] = max(self.end[number], position)

    def use_all(self, operands: list[Held], position: int) -> None:
        """Everything that operands hold is read at a position."""
        for held in operands:
            for number in held.values():
                self.use(number, position)

    def replace(self, number: int, by: int) -> None:
        """A value turns out to be another one."""
        by = self.value(by)
        self.replaced[number] = by
        self.use(by, self.end[number])

    def live_ranges(self) -> dict[tuple[str, Index], tuple[int, int]]:
        """First and last position, both included, per (instruction name, index) that defines a value, as XLA counts.

        Values that must be the same bytes never overlap: each ends where the next one begins.
        """
        ranges = {number: (self.start[number], self.end[number]) for number in range(len(self.names))}
        groups: dict[int, list[int]] = {}
        for number in ranges:
            if number not in self.replaced:
                groups.setdefault(self.buffer(number), []).append(number)
        result = {}
        last = len(self.schedule) - 1
        for members in groups.values():
            members.sort(key=lambda number: ranges[number])
            for one, other in itertools.pairwise(members):
                (start, end), (next_start, next_end) = ranges[one], ranges[other]
                ranges[other] = (next_start, max(end, next_end))
                ranges[one] = (start, min(end, next_start))
            for number in members:
                start, end = ranges[number]
                result[self.names[number], self.indices[number]] = (start, max(start, min(end, last)))
        return result


def part(held: Held, number: int) -> Held:
    """What an element of a tuple holds."""
    return {index[1:]: value for index, value in held.items() if index[:1] == (number,)}


def placed(held: Held, *place: int) -> Held:
    """The same values as an element of a tuple."""
    return {(*place, *index): value for index, value in held.items()}
