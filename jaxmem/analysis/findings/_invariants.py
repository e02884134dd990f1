"""Values that a scan stacks although they are the same in every step."""

from collections.abc import Mapping, Sequence

from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.findings._words import names, within
from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import parse_shape


def invariants(activations: Sequence[Buffer], origins: Mapping[str, Origin], module: Module) -> list[Finding]:
    found = []
    for buffer in activations:
        origin = origins.get(buffer.name)
        if origin is None or not origin.stacked:
            continue
        shape = parse_shape(buffer.layout)
        trips = shape[0] if shape else 1
        if trips > 1 and is_loop_invariant(module, origin.instruction):
            found.append(
                Finding(
                    kind="loop_invariant",
                    size_bytes=buffer.size_bytes * (trips - 1) // trips,
                    title=f"a scan keeps {trips} copies of {buffer.op}{within(buffer.layer)}, the same in every step",
                    evidence=names([buffer]),
                    cure="Wrap the scanned body in jax.checkpoint (remat='full' or a policy), or compute the value "
                    "before the scan and pass it in whole.",
                )
            )
    return found


def is_loop_invariant(module: Module, instruction: Instruction) -> bool:
    """Whether a value computed in a loop's body is the same in every trip."""
    return _invariant(module, instruction, {}, 0)


def _invariant(module: Module, node: Instruction | None, known: dict[str, bool], depth: int) -> bool:
    if node is None or depth > 200:
        return False
    if node.name in known:
        return known[node.name]
    known[node.name] = False  # a cycle depends on itself
    computation = module.computation_of[node.name]
    call = module.first_call(computation)
    if node.opcode in ("constant", "iota"):
        answer = True
    elif node.opcode == "get-tuple-element" and call is not None and call.role == "body":
        answer = _passed_on(module, computation, node)
    elif node.opcode == "parameter":
        number = int(node.literal) if node.literal.isdigit() else 0
        answer = (
            call is not None
            and call.role in ("calls", "to_apply")
            and call.caller.opcode in ("fusion", "call")
            and _invariant(module, module.operand(call.caller, number), known, depth + 1)
        )
    elif node.opcode in ("while", "rng", "rng-bit-generator", "rng-get-and-update-state", "custom-call"):
        answer = False
    else:
        operands = node.operands
        answer = bool(operands) and all(_invariant(module, module.instruction(n), known, depth + 1) for n in operands)
    known[node.name] = answer
    return answer


def _passed_on(module: Module, body: Computation, element: Instruction) -> bool:
    """Whether a loop's body returns this element of its state as it came."""
    index = int(element.attribute("index") or 0)
    source = module.operand(element, 0)
    if body.root is None or body.root.opcode != "tuple" or source is None or source.opcode != "parameter":
        return False
    returned = module.operand(body.root, index)
    while returned is not None and returned.opcode in ("copy", "bitcast"):
        returned = module.operand(returned, 0)
    return (
        returned is not None
        and returned.opcode == "get-tuple-element"
        and returned.operands == element.operands
        and int(returned.attribute("index") or -1) == index
    )
