"""The record of one analysed program."""

import json
from collections.abc import Callable
from typing import Any

from jaxmem._display import column, columns, record
from jaxmem._settled import WORDS
from jaxmem._shown import Shown
from jaxmem._units import format_bytes
from jaxmem.analysis._fits import Fits
from jaxmem.analysis._json import read_record, record_schema, values_of
from jaxmem.analysis._phases import PhasePeak
from jaxmem.analysis._records import (
    Buffer,
    DonationMiss,
    DtypeBytes,
    Finding,
    LayerBytes,
    Setting,
    SourceLine,
    StepTime,
    Timeline,
)

SCHEMA = "jaxmem.report/1"
DETAILS = ("by_layer", "buffers", "timeline", "source_lines")


def _reduced(report: "MemoryReport") -> str:
    if report.gradient_reductions is None:
        return "-"
    return f"{report.gradient_reductions:.3g} x, {format_bytes(report.gradient_reduction_bytes)}"


def _timed(report: "MemoryReport") -> str:
    time = report.step_time
    if time is None:
        return "estimate"
    if time.method == "roofline":
        return "estimate by a roofline"
    filled = f", {time.filled_share:.0%} filled by a roofline" if time.filled_share else ""
    return f"estimate by the compiler's cycles{filled}"


def _form(field: str) -> Callable[["MemoryReport"], str]:
    """A setting of the form in a word; a dash for what is no step."""
    return lambda report: WORDS[field].get(getattr(report, field), getattr(report, field) or "-")


@record
class MemoryReport(Shown, identity=("name", "target", "peak_bytes", "fits", "provenance")):
    """What a compiled program needs. Bytes are per device; None means unknown."""

    # fmt: off
    name: str = column("Name of the program or variant.")
    target: str = column("Name of the target that it was compiled for.")
    provenance: str = column(
        'Where the bytes are from: "compiled", the target\'s compiler. `provenances` has the exceptions, by number.',
        default="compiled")
    backend: str = column("Platform whose compiler it was.")
    jax_version: str = column("Version of the JAX that ran the compiler.")
    devices: int = column("Number of devices of the program.", default=1)
    peak_bytes: int | None = column(
        "The larger of argument + output + temp - alias and the compiler's own peak; the former on CPU, whose peak "
        "leaves out what loops hold, and on a TPU where its peak counts memory on the chip too.", "compiled",
        default=None, terminal="peak", row="peak", page_row="peak", diff="peak", rank=1)
    compiler_peak_bytes: int | None = column(
        "The compiler's own peak, whether or not `peak_bytes` is taken from it.", "compiled",
        default=None, terminal="compiler's own peak", page="compiler's own peak", after="alias_bytes")
    argument_bytes: int | None = column(
        "Arguments.", "argument_provenance",
        default=None, terminal="  arguments", page="arguments", row="arguments", diff="argument")
    output_bytes: int | None = column(
        "Outputs.", "compiled", default=None, terminal="  outputs", page="outputs", row="outputs")
    temp_bytes: int | None = column(
        "Temporaries: what lives between arguments and outputs.", "compiled", default=None,
        terminal="  temporaries", page="temporaries", row="temps", page_row="temporaries", diff="temp", rank=2)
    alias_bytes: int | None = column(
        "Outputs that reuse the buffer of a donated argument.", "compiled", default=None,
        terminal="  aliased", page="aliased", note="outputs in donated arguments", row="aliased")
    host_argument_bytes: int | None = column("Arguments on the host.", "compiled", default=None)
    host_output_bytes: int | None = column("Outputs on the host.", "compiled", default=None)
    host_temp_bytes: int | None = column(
        "Temporaries on the host.", "compiled", default=None,
        terminal="host temporaries", page="host temporaries", row="host temps", after="generated_code_bytes")
    host_alias_bytes: int | None = column(
        "Outputs on the host that reuse the buffer of a donated argument.", "compiled", default=None)
    generated_code_bytes: int | None = column(
        "The program itself.", "compiled", default=None, terminal="generated code", after="compiler_peak_bytes")
    argument_provenance: str = column(
        '"modelled" where `argument_bytes` had to come from shapes and shardings.', default="compiled")
    saved_residual_bytes: int | None = column(
        "Residuals that one micro-batch keeps for its backward pass, from the trace, in bytes as the target stores "
        "them: on a TPU with the padding of its tiles and, without remat, without those that its compiler computes, "
        "element by element, where they are read.", "modelled", default=None,
        terminal="saved residuals*", page="saved residuals", note="modelled, one micro-batch",
        row="residuals*", page_row="residuals*", diff="saved residual", rank=3)
    settings: tuple[Setting, ...] = column(
        "What the program was made with: the fields of the config, the batch, the options of the file.", default=())
    config: str = column("The step's `MemoryConfig` as JSON, as asked; empty of what is no step.", default="")
    remat: str = column("Name of the rematerialisation setting.", default="none")
    order: str | None = column(
        'Of a step, when weight gradients are made: "tied", before the backward pass goes on, or "free".',
        default=None, row="order", page_row="order", words=_form("order"), where="order", rank=8)
    roll: bool | None = column(
        "Of a step, whether repeated unrolled layers are asked to run as one scan.",
        default=None, row="layers", page_row="layers", words=_form("roll"), where="roll", rank=8)
    random: str | None = column(
        'Of a step, whether its masks are "fenced", drawn once and fused into nothing, or "free".',
        default=None, row="masks", page_row="masks", words=_form("random"), where="random", rank=8)
    generator: str | None = column(
        "Of a step, the generator of its random numbers.",
        default=None, row="generator", page_row="generator", where="generator", rank=8)
    forward_flops: int | None = column(
        "FLOPs of matrix products and convolutions outside the backward pass, over all micro-batches and all devices, "
        "from the trace.", "modelled", default=None,
        terminal="forward*", page="forward", note="modelled, all devices", row="forward*", rank=7)
    asked_recompute_flops: int | None = column(
        "FLOPs that the trace asks to compute again, over all devices.", "modelled", default=None)
    flops: int | None = column(
        "FLOPs of the whole compiled program, loops multiplied out, per device.", "compiled",
        default=None, terminal="whole program", page="whole program", note="per device")
    recompute_flops: int | None = column(
        "FLOPs that the compiled program really computes again, per device.", "compiled", default=None,
        terminal="recomputed", page="recomputed", note="per device", row="recompute", page_row="recompute", rank=4)
    gradient_reduction: str | None = column(
        'Of a step on several shards of a batch: gradients are reduced "once" a step or after "each" micro-batch.',
        default=None)
    gradient_reductions: float | None = column(
        "How often a step reduces its gradients between devices, on average over their elements; counted in the "
        "compiled program, where gradients are told by their sizes.", "compiled", default=None)
    gradient_reduction_bytes: int | None = column(
        "Gradients that are reduced in a step, per device.", "compiled",
        default=None, terminal="gradients reduced", page="gradients reduced", words=_reduced)
    step_seconds: float | None = column(
        "Estimated time of a call, that of `step_time`; None where the chip's rates are unknown.", "modelled",
        default=None, terminal="time of a step (estimate)", page="step time", note=_timed,
        row="time~", page_row="step time*", rank=5)
    compile_seconds: float | None = column(
        "Wall time that the compiler took for the program, on this machine; reports that differ in it are equal.",
        "measured", default=None, page="time to compile", note="measured on this machine",
        row="compile^", page_row="time to compile (measured here)", where="roll", rank=8)
    fits: Fits = column(
        '"yes", "no" or "uncertain"; of a step, whether all phases of a run fit.', row="fits", rank=6)
    fits_reason: str = column("Why, with the reserve assumed.")
    phases: tuple[PhasePeak, ...] = column(
        "The peak of each phase of a run: making the state, a step, restoring and saving the state. Empty of what is "
        "no step.", default=())
    capacity_bytes: int | None = column("Memory of one device of the target.", default=None)
    step_time: StepTime | None = column("How the time was estimated.", default=None)
    buffer_provenance: str = column(
        'Where all that follows is from: "compiled", the compiler\'s own buffers, or "modelled" where they had to be '
        "worked out from its program.", default="compiled")
    by_kind: tuple[tuple[str, int], ...] = column(
        "(kind, bytes) pairs at the peak, largest first; they sum to `peak_bytes`. Empty where the compiler does not "
        "show its buffers.", "buffer_provenance", default=())
    argument_dtypes: tuple[DtypeBytes, ...] = column(
        "Bytes of the arguments by kind and dtype, largest first: the dtypes that the optimizer's state is kept in.",
        "buffer_provenance", default=())
    by_layer: tuple[LayerBytes, ...] = column("Bytes at the peak by layer and kind, largest first.", default=())
    buffers: tuple[Buffer, ...] = column("The buffers alive at the peak, largest first.", default=())
    timeline: Timeline | None = column("Live bytes over the schedule.", default=None)
    source_lines: tuple[SourceLine, ...] = column(
        "The text of the user's lines that buffers and timeline name, where their files could be read.", default=())
    padding_bytes: int | None = column(
        "Bytes of the buffers at the peak that hold nothing.", "buffer_provenance",
        default=None, page="padding at peak", after="host_temp_bytes")
    donation_misses: tuple[DonationMiss, ...] = column("Donated leaves that no output could reuse.", default=())
    findings: tuple[Finding, ...] = column("What costs bytes without need, and the cure, largest first.", default=())
    warnings: tuple[str, ...] = column("Sentences on what these numbers do not show.", default=())
    notes: tuple[str, ...] = column("Sentences on what was done, and is as it should be.", default=())
    # fmt: on

    @property
    def most_bytes(self) -> int | None:
        """The most that any phase of a run needs, on one device; of what is no step `peak_bytes`."""
        return max((s for s in (self.peak_bytes, *(p.peak_bytes for p in self.phases)) if s is not None), default=None)

    @property
    def provenances(self) -> dict[str, str]:
        """Where each number is from: "compiled", "modelled" or "measured"."""
        return {each.name: each.provenance_in(self) for each in columns(type(self)) if each.provenance}

    def to_dict(self, *, details: bool = True) -> dict[str, Any]:
        """The fields as JSON-ready values, `provenances`, and the name of the `schema`.

        Args:
          details: whether to hold the buffers, layers and timeline too, which may be many.
        """
        fields = {name: value for name, value in values_of(self).items() if details or name not in DETAILS}
        return {"schema": SCHEMA, **fields, "provenances": self.provenances}

    def to_json(self) -> str:
        """`to_dict` as JSON, a line a field."""
        fields = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in self.to_dict().items()]
        return "{\n" + ",\n".join(fields) + "\n}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MemoryReport":
        """The report that `to_dict` made `values` of; what it left out as details is empty.

        Raises:
          InputError: another schema, a key too many or too few, or a value of the wrong type.

        >>> report = MemoryReport(name="a", target="cpu", backend="cpu", jax_version="0", fits="yes", fits_reason="")
        >>> MemoryReport.from_dict(json.loads(report.to_json())) == report
        True
        """
        return read_record(cls, values, schema=SCHEMA, computed=("provenances",))


def report_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `MemoryReport.to_dict()`, of all its details or without them.

    >>> schema = report_schema()
    >>> schema["properties"]["temp_bytes"]["description"]
    'Temporaries: what lives between arguments and outputs.'
    >>> sorted(schema["$defs"])[:3]
    ['Buffer', 'DonationMiss', 'DtypeBytes']
    """
    origins = {"type": "object", "additionalProperties": {"type": "string"}}
    return record_schema(MemoryReport, schema=SCHEMA, optional=DETAILS, computed={"provenances": origins})
