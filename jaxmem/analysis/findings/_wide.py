"""Floats wider than they need be."""

from collections.abc import Mapping, Sequence

from jaxmem._units import format_bytes
from jaxmem.analysis._cures import IN_SLICES, VOCABULARY, Asked, compile_elsewhere, compute_narrow
from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.findings._words import groups, names, within
from jaxmem.analysis.hlo._module import Instruction, Module
from jaxmem.analysis.hlo._types import parse_shape


def wide(activations: Sequence[Buffer], module: Module, asked: Asked) -> list[Finding]:
    """Wide floats: all of a program that computes in float32, or those of one that computes in 16 bits elsewhere."""
    floats = [b for b in activations if b.shape.startswith(("f32[", "f64["))]
    size = sum(b.size_bytes for b in floats)
    if size and not computes_in_16_bits(module):
        cure = compute_narrow(asked)
        return [
            Finding(
                kind="float32",
                size_bytes=0 if asked.draws_and_recomputes else size // 2,
                estimated=True,
                title=f"{format_bytes(size)} of activations are computed in {floats[0].shape.split('[')[0]}",
                evidence=names(sorted(floats, key=lambda b: -b.size_bytes)),
                **cure.fields,
            )
        ]
    found = []
    for (op, source, layer), group in groups(floats, lambda b: (b.op, b.source, b.layer)).items():
        size = sum(b.size_bytes for b in group)
        found.append(
            Finding(
                kind="upcast",
                size_bytes=size // 2,
                estimated=True,
                title=f"{format_bytes(size)} of {group[0].shape.split('[')[0]} from {op}{within(layer)}"
                f"{f' ({source})' if source else ''} in a program that computes in 16 bits",
                evidence=names(group),
                cure=IN_SLICES
                if parse_shape(group[0].layout)[-1:] >= (VOCABULARY,)
                else "Compute it in the compute dtype, or have it recomputed (remat) so that it is never kept.",
            )
        )
    return found


def computes_in_16_bits(module: Module) -> bool:
    """Whether the program itself, not only its compiler, has 16-bit floats: among its arguments or by a cast."""
    for computation in module.computations.values():
        entry = computation.name == module.entry
        for i in computation.instructions.values():
            if i.type.startswith(("bf16[", "f16[")) and (
                (entry and i.opcode == "parameter") or (i.opcode == "convert" and _is_cast(i))
            ):
                return True
    return False


def _is_cast(instruction: Instruction) -> bool:
    """Whether a `convert` stands in the user's program; those that compilers add carry another operation's scope."""
    return instruction.op_name.endswith("convert_element_type")


def computed_wide(activations: Sequence[Buffer], origins: Mapping[str, Origin], module: Module) -> list[Finding]:
    """On a CPU the compiler itself widens 16-bit floats."""
    narrow = [b for b in activations if b.shape.startswith("f32[") and _was_narrow(origins.get(b.name), module, b)]
    if not narrow:
        return []
    cure = compile_elsewhere()
    return [
        Finding(
            kind="not_evidenced",
            size_bytes=sum(b.size_bytes for b in narrow) // 2,
            estimated=True,
            title=f"XLA:CPU keeps {len(narrow)} arrays of 16-bit floats in float32: a TPU or GPU does not",
            evidence=names(sorted(narrow, key=lambda b: -b.size_bytes)),
            **cure.fields,
        )
    ]


def _was_narrow(origin: Origin | None, module: Module, buffer: Buffer) -> bool:
    """Whether a wide array is a cast of a narrow one that the compiler made."""
    own = module.instruction(buffer.name.split("{")[0])
    callee = module.callee(own, "calls") if own is not None and own.opcode == "fusion" else None
    if callee is None:
        return own is not None and own.opcode == "convert" and origin is not None and not _is_cast(own)
    inside = callee.instructions.values()
    if any(i.opcode == "convert" and _is_cast(i) and i.type.startswith("f32[") for i in inside):
        return False
    types = [i.type for i in inside if i.opcode == "parameter"]
    return any(t.startswith(("bf16[", "f16[")) and parse_shape(t) == parse_shape(buffer.layout) for t in types)
