"""The walk over a compiled program: what one run comes to, with loops multiplied out.

FLOPs, seconds, reductions and whatever else is counted a step differ in what an instruction is worth by itself. That a
loop repeats its body, a conditional runs one branch and a call runs what it names is the same for all, and stands here.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from jaxmem.analysis.hlo._loops import trip_count
from jaxmem.analysis.hlo._module import Computation, Instruction, Module

# What these call runs as a part of the program; the function of a reduction or a sort does not count as that.
CALLS = frozenset(("fusion", "fusion-start", "call", "call-start", "async-start", "while", "conditional"))


T = TypeVar("T", bound=tuple)


def plus(one: T, other: T, times: float = 1) -> T:
    """An amount, which is a NamedTuple of numbers, with `times` as much of another."""
    return type(one)(*(mine + more * times for mine, more in zip(one, other, strict=True)))


class Walk(Generic[T]):
    """Amounts of a module's computations; each is looked at once, however often it is called.

    Args:
      module: to be walked.
      none: the amount of nothing.
      run: the amount of one run of a computation; it asks `called` for what an instruction calls.
      size: of a conditional the branch with the largest counts.

    After the walk, `endless` are the amounts of one trip of each loop whose trip count is unknown, which counts once,
    and `chosen` those of the branch taken of each conditional.
    """

    def __init__(self, module: Module, none: T, run: Callable[[Computation], T], size: Callable[[T], float]):
        self.module = module
        self.endless: list[T] = []
        self.chosen: list[T] = []
        self._none, self._run, self._size = none, run, size
        self._known: dict[str, T] = {}

    def entry(self) -> T:
        """The amount of one run of the program.

        Raises:
          ValueError: the module has no entry computation.
        """
        if self.module.entry is None:
            raise ValueError("HLO text without an ENTRY computation")
        return self.computation(self.module.entry)

    def computation(self, name: str) -> T:
        """The amount of one run of a computation; nothing where the module has none of that name."""
        known = self._known.get(name)
        if known is None:
            self._known[name] = self._none  # no program calls itself, but a text may be anything
            computation = self.module.computations.get(name)
            known = self._known[name] = self._none if computation is None else self._run(computation)
        return known

    def called(self, computation: Computation, instruction: Instruction) -> T:
        """The amount of all that an instruction of `computation` calls."""
        total = self._none
        if instruction.opcode == "conditional":
            branches = [self.computation(name) for name in instruction.branches]
            total = max(branches, key=self._size, default=self._none)
            self.chosen.append(total)
        elif instruction.opcode == "while":
            parts = [self.computation(instruction.attribute(part) or "") for part in ("condition", "body")]
            trips = trip_count(self.module, computation, instruction)
            for part in parts:
                total = plus(total, part, 1 if trips is None else trips)
            if trips is None:
                self.endless.append(total)
        else:
            for _, name in instruction.called:
                total = plus(total, self.computation(name))
        return total
