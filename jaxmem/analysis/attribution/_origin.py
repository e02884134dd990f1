"""Which operation really computed a buffer: through tuples, loops, fusions, copies and in-place updates.

Most buffers at the peak of a training step belong to a `while`, whose own scope says only ".../while". What
they hold was computed by an operation of the loop's body, and written into place by a dynamic-update-slice.
"""

from typing import NamedTuple

from jaxmem.analysis.hlo._module import Instruction, Module

# Pass a value on: its first operand is what was computed.
_PASSING = frozenset(
    "bitcast copy copy-start copy-done reshape async-update opt-barrier "
    "bitcast-convert all-gather-done all-reduce-done collective-permute-done slice transpose "
    "dynamic-slice reduce-precision".split()
)
# A computation that runs beside others: its start has the result as its second element.
_STARTS = ("fusion-start", "async-start", "call-start")
_DONES = ("fusion-done", "async-done", "call-done")
# Made by the compiler without a scope of their own; where they have one it tells more than the operand's.
_PLACEHOLDERS = frozenset("broadcast constant iota pad".split())
_SCOPELESS = ("while", "closed_call", "cond", "body", "checkpoint", "remat")


class Origin(NamedTuple):
    """What computed a value.

    Args:
      instruction: the operation; `opcode` "parameter" where the value is an argument of the program.
      stacked: whether a loop writes it slice by slice, so that the buffer holds all trips' values.
      part: the slice of its result that the value is; empty for all of it.
    """

    instruction: Instruction
    stacked: bool = False
    part: str = ""


def origin(module: Module, name: str, index: tuple[int, ...] = ()) -> Origin | None:
    """The origin of value `name{index}`, or None where no operation with a scope is found."""
    instruction = module.instruction(name)
    if instruction is None:
        return None
    search = _Search(module)
    found = search.find(instruction, index, False)
    return found and found._replace(part=search.part)


class _Search:
    """One walk; each (instruction, index) is looked at once, so that cycles through loops end."""

    def __init__(self, module: Module):
        self.module = module
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self.part = ""

    def find(self, node: Instruction | None, index: tuple[int, ...], stacked: bool) -> Origin | None:
        while node is not None:
            if (node.name, index) in self.seen:
                return None
            self.seen.add((node.name, index))
            opcode, module = node.opcode, self.module
            if opcode == "get-tuple-element":
                index = (int(node.attribute("index") or 0), *index)
                node = module.operand(node, 0)
            elif opcode == "tuple":
                if not index:
                    return None
                node, index = module.operand(node, index[0]), index[1:]
            elif opcode == "while":
                return self._loop(node, index, stacked)
            elif opcode in ("fusion", "call"):
                return self._inside(node, index, stacked)
            elif opcode in _STARTS and "calls=" in node.rest:  # ((operands), result, context)
                return self._inside(node, index[1:], stacked)
            elif opcode in _DONES:
                node, index = module.operand(node, 0), (1, *index)
            elif opcode == "conditional":
                return self._branches(node, index, stacked)
            elif opcode == "parameter":
                outer = self._outer(node, index)
                if outer is None:
                    return Origin(node, stacked)
                node, index = outer
            elif opcode in ("dynamic-update-slice", "scatter") and not says(node.op_name):
                number = 1 if opcode == "dynamic-update-slice" else len(node.operands) - 1
                node, stacked = module.operand(node, number), True
            elif opcode == "dynamic-update-slice":
                written = self.find(module.operand(node, 1), (), True)
                return written if written and written.instruction.opcode != "parameter" else Origin(node, True)
            elif opcode in _PLACEHOLDERS or "AllocateBuffer" in node.rest[:400]:
                return self._filled_later(node, index, stacked) or self._own(node, stacked)
            elif opcode in _PASSING:
                if opcode in ("slice", "dynamic-slice") and not self.part:
                    self.part = node.name
                index = index[1:] if opcode.endswith("-start") and index else index
                passed = self.find(module.operand(node, 0), index, stacked)
                return passed or self._own(node, stacked)
            elif says(node.op_name):
                return Origin(node, stacked)
            else:
                return self._first_of_operands(node, stacked)
        return None

    def _own(self, node: Instruction, stacked: bool) -> Origin | None:
        return Origin(node, stacked) if node.op_name else None

    def _loop(self, node: Instruction, index, stacked) -> Origin | None:
        """What the body writes at `index`; where it passes the value on, what came in."""
        body = self.module.callee(node, "body")
        if body is not None and body.root is not None and index:
            made = self.find(body.root, index, stacked)
            if made is not None:
                return made
        self.seen.discard((node.name, index))
        initial = self.module.operand(node, 0)
        return self.find(initial, index, stacked)

    def _inside(self, node: Instruction, index, stacked) -> Origin | None:
        """The root of the called computation at `index`; the fusion itself where that says nothing."""
        whole = index
        callee = self.module.callee(node, "calls", "to_apply")
        if callee is not None and callee.root is not None:
            if callee.root.opcode != "tuple":
                index = ()
            elif not index:  # the tuple itself, a table of pointers
                return self._own(node, stacked)
            found = self.find(callee.root, index, stacked)
            if found is None or found.instruction.opcode in _PLACEHOLDERS:
                return self._filled_later(node, whole, stacked) or found or self._own(node, stacked)
            return found
        return self._own(node, stacked)

    def _branches(self, node: Instruction, index, stacked) -> Origin | None:
        for name in node.branches:
            branch = self.module.computations.get(name)
            if branch is not None and branch.root is not None:
                found = self.find(branch.root, index, stacked)
                if found is not None and found.instruction.opcode != "parameter":
                    return found
        return self._own(node, stacked)

    def _outer(self, node: Instruction, index) -> tuple[Instruction, tuple[int, ...]] | None:
        """What a computation's parameter stands for at its call; None for the entry's."""
        computation = self.module.computation_of[node.name]
        call = self.module.first_call(computation)
        if call is None or computation.name == self.module.entry:
            return None
        if call.role in ("body", "condition"):
            # As the loop's own value: `_loop` looks into the body first, then at what came in.
            return call.caller, index
        number = int(node.literal) if node.literal.isdigit() else 0
        if call.role in ("branch_computations", "true_computation", "false_computation"):
            branches = call.caller.branches
            number = 1 + branches.index(computation.name) if computation.name in branches else 1
        operand = self.module.operand(call.caller, number)
        return (operand, index) if operand is not None else None

    def _filled_later(self, node: Instruction, index, stacked) -> Origin | None:
        """A placeholder that a loop fills: what the loop writes there."""
        for user, number in self.module.users(node.name):
            found = None
            if user.opcode == "tuple":
                for loop, _ in self.module.users(user.name):
                    if loop.opcode == "while":
                        found = found or self._loop_only(loop, (number, *index), stacked)
            elif user.opcode == "get-tuple-element":
                if index and int(user.attribute("index") or 0) == index[0]:
                    found = self._filled_later(user, index[1:], stacked)
            elif user.opcode in ("bitcast", "copy", "reshape"):
                found = self._filled_later(user, index, stacked)
            if found is not None and found.instruction.opcode not in _PLACEHOLDERS:
                return found
        return None

    def _loop_only(self, loop: Instruction, index, stacked) -> Origin | None:
        body = self.module.callee(loop, "body")
        if body is None or body.root is None:
            return None
        return self.find(body.root, index, stacked)

    def _first_of_operands(self, node: Instruction, stacked) -> Origin | None:
        """An operation without a scope: that of the first operand that has one."""
        parameter = None
        for number in range(len(node.operands)):
            found = self.find(self.module.operand(node, number), (), stacked)
            if found is None:
                continue
            if found.instruction.opcode not in ("parameter", "constant"):
                return found
            parameter = parameter or found
        return self._own(node, stacked) or parameter


def says(op_name: str) -> bool:
    """Whether a scope path names an operation rather than only the loop or call that holds it."""
    return bool(op_name) and op_name.rsplit("/", 1)[-1] not in _SCOPELESS
