"""What costs bytes at the peak without need, as far as the compiled program shows it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxmem.analysis._hlo import Computation, Instruction, parse_shape
from jaxmem.analysis._records import Buffer, DonationMiss, Finding
from jaxmem.analysis._units import format_bytes
from jaxmem.analysis.attribution._graph import Graph
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.attribution._scopes import parse_scope

_WORTH = 0.01  # of the peak: what is smaller is not worth a line
_RANDOM = ("threefry", "random_bits", "_bernoulli", "_uniform", "random_wrap", "rng_bit_generator")


def findings(
    buffers: Sequence[Buffer],
    origins: Mapping[str, Origin],
    graph: Graph,
    donation_misses: Iterable[DonationMiss] = (),
    backend: str = "",
    schedule: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """The findings, largest first.

    Args:
      buffers: those alive at the peak.
      origins: by the buffers' names.
      graph: of the compiled module.
      donation_misses: donated leaves that no output reuses.
      backend: the platform compiled for.
      schedule: instruction names in the order in which they run.
    """
    total = sum(b.size_bytes for b in buffers)
    activations = [b for b in buffers if b.kind == "activations"]
    found = [
        *_kept_for_backward(activations, origins, graph, schedule),
        *_donation(donation_misses),
        *_padding(buffers),
        *(_computed_wide(activations, origins, graph) if backend == "cpu" else _wide(activations, graph)),
        *_invariants(activations, origins, graph),
        *_twice(activations, origins),
        *_random_bits(activations),
        *_accumulators(buffers),
    ]
    return tuple(sorted((f for f in found if f.size_bytes >= _WORTH * total), key=lambda f: -f.size_bytes))


def _donation(misses: Iterable[DonationMiss]) -> list[Finding]:
    return [
        Finding(
            kind="donation_miss",
            size_bytes=miss.size_bytes,
            title=f"{miss.path} is donated, but no output reuses its buffer",
            evidence=(f"{miss.dtype_in} in, {miss.dtype_out or 'no output of this shape'} out",),
            cure="Return it with the dtype, shape and sharding that it came in with"
            + (f": cast it back to {miss.dtype_in}." if miss.dtype_out and miss.dtype_out != miss.dtype_in else "."),
        )
        for miss in misses
    ]


def _kept_for_backward(
    activations: Sequence[Buffer], origins: Mapping[str, Origin], graph: Graph, schedule: Sequence[str]
) -> list[Finding]:
    """Values of the forward pass that wait for the backward pass: what rematerialisation is for."""

    def waits(buffer: Buffer) -> bool:
        if buffer.phase != "forward":
            return False
        if buffer.name in origins and origins[buffer.name].stacked:
            return True
        user = graph.instruction(schedule[buffer.end]) if buffer.end < len(schedule) else None
        return user is not None and parse_scope(user.op_name).phase in ("backward", "recompute")

    kept = sorted((b for b in activations if waits(b)), key=lambda b: -b.size_bytes)
    if not kept:
        return []
    return [
        Finding(
            kind="residuals",
            size_bytes=sum(b.size_bytes for b in kept),
            estimated=True,
            title=f"{len(kept)} values of the forward pass wait for the backward pass"
            + _in(_common([b.layer for b in kept])),
            evidence=_names(kept),
            cure="Rematerialise: jaxmem compare FILE --remat none,full,dots,dots_no_batch shows what policies keep. "
            "More accumulation steps shrink them all.",
        )
    ]


def _padding(buffers: Sequence[Buffer]) -> list[Finding]:
    found = []
    for (shape, layer), group in _groups(
        [b for b in buffers if b.padding_bytes > 0.05 * b.size_bytes], lambda b: (b.shape, b.layer)
    ).items():
        found.append(
            Finding(
                kind="padding",
                size_bytes=sum(b.padding_bytes for b in group),
                title=f"{shape}{_in(layer)} is padded to the chip's tiles: {_share(group):.0%} of it holds nothing",
                evidence=_names(group),
                cure="Make the two minor dimensions multiples of the tile (128 lanes; 8 rows of 32 bits, 16 of 16 "
                "bits), or move a large axis last.",
            )
        )
    return found


def _wide(activations: Sequence[Buffer], graph: Graph) -> list[Finding]:
    """Wide floats: all of a program that computes in float32, or those of one that computes in 16 bits elsewhere."""
    wide = [b for b in activations if b.shape.startswith(("f32[", "f64["))]
    size = sum(b.size_bytes for b in wide)
    if size and not computes_in_16_bits(graph):
        return [
            Finding(
                kind="float32",
                size_bytes=size // 2,
                estimated=True,
                title=f"{format_bytes(size)} of activations are computed in {wide[0].shape.split('[')[0]}",
                evidence=_names(sorted(wide, key=lambda b: -b.size_bytes)),
                cure='Compute in 16 bits: MemoryConfig(precision="bfloat16") keeps float32 parameters beside it.',
            )
        ]
    found = []
    for (op, source, layer), group in _groups(wide, lambda b: (b.op, b.source, b.layer)).items():
        size = sum(b.size_bytes for b in group)
        found.append(
            Finding(
                kind="upcast",
                size_bytes=size // 2,
                estimated=True,
                title=f"{format_bytes(size)} of {group[0].shape.split('[')[0]} from {op}{_in(layer)}"
                f"{f' ({source})' if source else ''} in a program that computes in 16 bits",
                evidence=_names(group),
                cure="Compute it in the compute dtype, or have it recomputed (remat) so that it is never kept; "
                "for logits, take the loss over slices of the sequence.",
            )
        )
    return found


def computes_in_16_bits(graph: Graph) -> bool:
    """Whether the program itself, not only its compiler, has 16-bit floats: among its arguments or by a cast."""
    for computation in graph.module.computations.values():
        entry = computation.name == graph.module.entry
        for i in computation.instructions.values():
            if i.type.startswith(("bf16[", "f16[")) and (
                (entry and i.opcode == "parameter") or (i.opcode == "convert" and _is_cast(i))
            ):
                return True
    return False


def _is_cast(instruction: Instruction) -> bool:
    """Whether a `convert` stands in the user's program; those that compilers add carry another operation's scope."""
    return instruction.op_name.endswith("convert_element_type")


def _computed_wide(activations: Sequence[Buffer], origins: Mapping[str, Origin], graph: Graph) -> list[Finding]:
    """On a CPU the compiler itself widens 16-bit floats."""
    narrow = [b for b in activations if b.shape.startswith("f32[") and _was_narrow(origins.get(b.name), graph, b)]
    if not narrow:
        return []
    return [
        Finding(
            kind="not_evidenced",
            size_bytes=sum(b.size_bytes for b in narrow) // 2,
            estimated=True,
            title=f"XLA:CPU keeps {len(narrow)} arrays of 16-bit floats in float32: a TPU or GPU does not",
            evidence=_names(sorted(narrow, key=lambda b: -b.size_bytes)),
            cure="Compile for the chip that will run it: --target tpu-v5e or gpu-h100.",
        )
    ]


def _was_narrow(origin: Origin | None, graph: Graph, buffer: Buffer) -> bool:
    """Whether a wide array is a cast of a narrow one that the compiler made."""
    own = graph.instruction(buffer.name.split("{")[0])
    callee = graph.callee(own, "calls") if own is not None and own.opcode == "fusion" else None
    if callee is None:
        return own is not None and own.opcode == "convert" and origin is not None and not _is_cast(own)
    inside = callee.instructions.values()
    if any(i.opcode == "convert" and _is_cast(i) and i.type.startswith("f32[") for i in inside):
        return False
    types = [i.type for i in inside if i.opcode == "parameter"]
    return any(t.startswith(("bf16[", "f16[")) and parse_shape(t) == parse_shape(buffer.layout) for t in types)


def _invariants(activations: Sequence[Buffer], origins: Mapping[str, Origin], graph: Graph) -> list[Finding]:
    found = []
    for buffer in activations:
        origin = origins.get(buffer.name)
        if origin is None or not origin.stacked:
            continue
        shape = parse_shape(buffer.layout)
        trips = shape[0] if shape else 1
        if trips > 1 and is_loop_invariant(graph, origin.instruction):
            found.append(
                Finding(
                    kind="loop_invariant",
                    size_bytes=buffer.size_bytes * (trips - 1) // trips,
                    title=f"a scan keeps {trips} copies of {buffer.op}{_in(buffer.layer)}, the same in every step",
                    evidence=_names([buffer]),
                    cure="Wrap the scanned body in jax.checkpoint (remat='full' or a policy), or compute the value "
                    "before the scan and pass it in whole.",
                )
            )
    return found


def is_loop_invariant(graph: Graph, instruction: Instruction) -> bool:
    """Whether a value computed in a loop's body is the same in every trip."""
    return _invariant(graph, instruction, {}, 0)


def _invariant(graph: Graph, node: Instruction | None, known: dict[str, bool], depth: int) -> bool:
    if node is None or depth > 200:
        return False
    if node.name in known:
        return known[node.name]
    known[node.name] = False  # a cycle depends on itself
    computation = graph.computation_of[node.name]
    call = graph.calls.get(computation.name)
    if node.opcode in ("constant", "iota"):
        answer = True
    elif node.opcode == "get-tuple-element" and call is not None and call.role == "body":
        answer = _passed_on(graph, computation, node)
    elif node.opcode == "parameter":
        number = int(node.literal) if node.literal.isdigit() else 0
        answer = (
            call is not None
            and call.role in ("calls", "to_apply")
            and call.caller.opcode in ("fusion", "call")
            and _invariant(graph, graph.operand(call.caller, number), known, depth + 1)
        )
    elif node.opcode in ("while", "rng", "rng-bit-generator", "rng-get-and-update-state", "custom-call"):
        answer = False
    else:
        operands = graph.operands(node)
        answer = bool(operands) and all(_invariant(graph, graph.instruction(n), known, depth + 1) for n in operands)
    known[node.name] = answer
    return answer


def _passed_on(graph: Graph, body: Computation, element: Instruction) -> bool:
    """Whether a loop's body returns this element of its state as it came."""
    index = int(element.attribute("index") or 0)
    source = graph.operand(element, 0)
    if body.root is None or body.root.opcode != "tuple" or source is None or source.opcode != "parameter":
        return False
    returned = graph.operand(body.root, index)
    while returned is not None and returned.opcode in ("copy", "bitcast"):
        returned = graph.operand(returned, 0)
    return (
        returned is not None
        and returned.opcode == "get-tuple-element"
        and graph.operands(returned) == graph.operands(element)
        and int(returned.attribute("index") or -1) == index
    )


def _twice(activations: Sequence[Buffer], origins: Mapping[str, Origin]) -> list[Finding]:
    """Residuals of one origin and as many elements: the same values, cast, transposed or a step of a loop apart."""
    large = [b for b in activations if b.phase == "forward" and b.name in origins and origins[b.name].stacked]
    found = []
    for (_, _, elements), group in _groups(
        large, lambda b: (origins[b.name].instruction.name, origins[b.name].part, math.prod(parse_shape(b.layout)))
    ).items():
        if len(group) > 1 and elements > 1:
            group = sorted(group, key=lambda b: b.size_bytes)
            found.append(
                Finding(
                    kind="kept_twice",
                    size_bytes=sum(b.size_bytes for b in group[:-1]),
                    title=f"{group[-1].op}{_in(group[-1].layer)} is kept {len(group)} times",
                    evidence=_names(group),
                    cure="Name one of them with checkpoint_name and save only that (Policy(save=...)): the others "
                    "follow from it at the price of a cast, a transpose or one step.",
                )
            )
    return found


def _random_bits(activations: Sequence[Buffer]) -> list[Finding]:
    group = [b for b in activations if b.shape.startswith(("u32[", "u64[")) and any(r in b.op_name for r in _RANDOM)]
    if not group:
        return []
    return [
        Finding(
            kind="random_bits",
            size_bytes=sum(b.size_bytes for b in group),
            title=f"{len(group)} buffers of random bits, for dropout or the like"
            + _in(_common([b.layer for b in group])),
            evidence=_names(group),
            cure="Use the hardware's generator, jax.config.update('jax_default_prng_impl', 'rbg') (other numbers, as "
            "random), or drop out a smaller array.",
        )
    ]


def _accumulators(buffers: Sequence[Buffer]) -> list[Finding]:
    group = [b for b in buffers if b.kind == "accumulators"]
    if not group:
        return []
    return [
        Finding(
            kind="accumulators",
            size_bytes=sum(b.size_bytes for b in group),
            title="gradient accumulators live beside each micro-batch's gradients",
            evidence=_names(group),
            cure="One micro-batch with rematerialisation may need less than several without: compare both. "
            "MemoryConfig(accumulator_dtype='bfloat16') halves them at the price of rounding.",
        )
    ]


def _groups(buffers: Iterable[Buffer], key: Callable) -> dict:
    groups: dict = {}
    for buffer in buffers:
        groups.setdefault(key(buffer), []).append(buffer)
    return groups


def _names(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    shown = [f"{b.name} {b.shape} {format_bytes(b.size_bytes)}{f' {b.source}' if b.source else ''}" for b in buffers]
    return (*shown[:4], f"and {len(shown) - 4} more") if len(shown) > 5 else tuple(shown)


def _in(layer: str) -> str:
    return f" in {layer}" if layer else ""


def _share(buffers: Sequence[Buffer]) -> float:
    return sum(b.padding_bytes for b in buffers) / sum(b.size_bytes for b in buffers)


def _common(layers: Sequence[str]) -> str:
    parts = [layer.split("/") for layer in layers]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return "/".join(shared)
