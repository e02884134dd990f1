"""HLO small enough to work out its time by hand."""

from jaxmem.analysis.step_time import ChipSpeed

CHIP = ChipSpeed(
    name="test",
    flops_per_second=(("float32", 1e12), ("bfloat16", 2e12), ("tf32", 1.5e12), ("int8", 4e12)),
    vector_flops_per_second=1e11,
    hbm_bytes_per_second=1e11,
    host_bytes_per_second=1e10,
    interconnect_bytes_per_second=1e10,
    clock_hertz=1e9,
)
DOT = "dot({0}, {0}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, operand_precision={{highest,highest}}"
SQUARE = "f32[1000,1000]{1,0}"
DOT_SECONDS = 2e9 / 1e12  # its 12 MB take 0.12 ms


def module(entry: str, *, others: str = "", header: str = "") -> str:
    """A module whose entry has one parameter `%x` of 1000 by 1000 float32."""
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return (
        f"HloModule m, is_scheduled=true{header}\n\n{others}\n"
        f"ENTRY %main (x: f32[1000,1000]) -> f32[] {{\n  %x = {SQUARE} parameter(0)\n{body}\n}}\n"
    )


def cycles(count: int) -> str:
    """The end of a TPU instruction."""
    return f', backend_config={{"window_config":{{"estimated_cycles":"{count}","iteration_bounds":[]}}}}'


def computation(name: str, lines: str, parameter: str = SQUARE) -> str:
    """A computation of one parameter `%p`."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return f"%{name} (p: f32[]) -> f32[] {{\n  %p = {parameter} parameter(0)\n{body}\n}}\n\n"
