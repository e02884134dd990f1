"""The record of one analysed program."""

import dataclasses
import json
from typing import Any

from jaxmem._display import renderers
from jaxmem._units import format_bytes, format_flops
from jaxmem.analysis._fits import Fits
from jaxmem.analysis._read import read_record
from jaxmem.analysis._records import Buffer, DonationMiss, DtypeBytes, Finding, LayerBytes, Moment, StepTime, Timeline

SCHEMA = "jaxmem.report/1"
DETAILS = ("by_layer", "buffers", "timeline")
_MODELLED = ("saved_residual_bytes", "forward_flops", "asked_recompute_flops")
_COMPILED = (
    "peak_bytes",
    "compiler_peak_bytes",
    "argument_bytes",
    "output_bytes",
    "temp_bytes",
    "alias_bytes",
    "host_argument_bytes",
    "host_output_bytes",
    "host_temp_bytes",
    "host_alias_bytes",
    "generated_code_bytes",
    "flops",
    "recompute_flops",
    "gradient_reduction_bytes",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What a compiled program needs. Bytes are per device; None means that nobody could tell.

    Args:
      name: of the program or variant.
      target: name of the target that it was compiled for.
      provenance: where the bytes are from: "compiled", the target's compiler. `provenances` has
        the exceptions, number by number.
      backend: platform whose compiler it was.
      jax_version: of the JAX that ran it.
      devices: number of devices of the program.
      peak_bytes: the larger of argument + output + temp - alias and the compiler's own peak; the former on
        CPU, whose peak leaves out what loops hold, and on a TPU where its peak counts memory on the chip too.
      compiler_peak_bytes: the compiler's own peak, believed or not.
      argument_bytes, output_bytes, temp_bytes: what goes in, what comes out, what lives between.
      alias_bytes: outputs that reuse the buffer of a donated argument.
      host_argument_bytes, host_output_bytes, host_temp_bytes, host_alias_bytes: the same on the host.
      generated_code_bytes: the program itself.
      argument_provenance: "modelled" where `argument_bytes` had to come from shapes and shardings.
      saved_residual_bytes: residuals that one micro-batch keeps for its backward pass, from the trace.
      remat: name of the rematerialisation setting.
      forward_flops: matrix-product and convolution FLOPs outside the backward pass, over all
        micro-batches and all devices, from the trace.
      asked_recompute_flops: those that the trace asks to compute again, over all devices.
      flops: all of the compiled program's, loops multiplied out, per device.
      recompute_flops: those that the compiled program really computes again, per device.
      gradient_reduction: of a step on several shards of a batch: "once" or "each" micro-batch, as it was built.
      gradient_reductions: how often a step reduces its gradients between devices, on average over their elements;
        in the compiled program, arrays told by their sizes.
      gradient_reduction_bytes: of gradients that are reduced in a step, per device.
      step_seconds: estimated time of a call, that of `step_time`; None where nothing is known of the chip.
      step_time: how the estimate came about.
      fits: "yes", "no" or "uncertain", and `fits_reason` with the reserve assumed.
      capacity_bytes: memory of one device of the target.
      buffer_provenance: where all that follows is from: "compiled", the compiler's own buffers, or "modelled" where
        they had to be worked out from its program.
      by_kind: (kind, bytes) pairs at the peak, largest first; they sum to `peak_bytes`. Empty where the
        compiler does not show its buffers.
      argument_dtypes: bytes of the arguments by kind and dtype, largest first: in what the optimizer's state is kept.
      by_layer: bytes at the peak by layer and kind, largest first.
      buffers: those alive at the peak, largest first.
      timeline: live bytes over the schedule.
      padding_bytes: of the buffers at the peak: bytes that hold nothing.
      donation_misses: donated leaves that no output could reuse.
      findings: what costs bytes without need, and the cure, largest first.
      warnings: sentences on what these numbers do not show.
    """

    name: str
    target: str
    provenance: str = "compiled"
    backend: str
    jax_version: str
    devices: int = 1
    peak_bytes: int | None = None
    compiler_peak_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    host_argument_bytes: int | None = None
    host_output_bytes: int | None = None
    host_temp_bytes: int | None = None
    host_alias_bytes: int | None = None
    generated_code_bytes: int | None = None
    argument_provenance: str = "compiled"
    saved_residual_bytes: int | None = None
    remat: str = "none"
    forward_flops: int | None = None
    asked_recompute_flops: int | None = None
    flops: int | None = None
    recompute_flops: int | None = None
    gradient_reduction: str | None = None
    gradient_reductions: float | None = None
    gradient_reduction_bytes: int | None = None
    step_seconds: float | None = None
    fits: Fits
    fits_reason: str
    capacity_bytes: int | None = None
    step_time: StepTime | None = None
    buffer_provenance: str = "compiled"
    by_kind: tuple[tuple[str, int], ...] = ()
    argument_dtypes: tuple[DtypeBytes, ...] = ()
    by_layer: tuple[LayerBytes, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    timeline: Timeline | None = None
    padding_bytes: int | None = None
    donation_misses: tuple[DonationMiss, ...] = ()
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def provenances(self) -> dict[str, str]:
        """Where each number is from: "compiled" or "modelled"."""
        origins = {**dict.fromkeys(_COMPILED, "compiled"), **dict.fromkeys(_MODELLED, "modelled")}
        buffers = dict.fromkeys(("by_kind", "argument_dtypes", "padding_bytes"), self.buffer_provenance)
        others = {"gradient_reductions": "compiled", "step_seconds": "modelled"}
        return {**origins, "argument_bytes": self.argument_provenance, **others, **buffers}

    def to_dict(self, *, details: bool = True) -> dict[str, Any]:
        """The fields as JSON-ready values, `provenances`, and the name of the `schema`.

        Args:
          details: whether to hold the buffers, layers and timeline too, which may be many.
        """
        names = [f.name for f in dataclasses.fields(self) if details or f.name not in DETAILS]
        fields = {name: _plain(getattr(self, name)) for name in names}
        return {"schema": SCHEMA, **fields, "by_kind": dict(self.by_kind), "provenances": self.provenances}

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

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return renderers().report_fragment(self)

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.target} ({self.backend}, jax {self.jax_version})"]
        for name in (*_COMPILED, *_MODELLED):
            value = getattr(self, name)
            if value is not None:
                text = format_bytes(value) if name.endswith("_bytes") else format_flops(value)
                lines.append(f"  {name} = {text} ({self.provenances[name]})")
        if self.gradient_reductions is not None:
            lines.append(f"  gradient_reductions = {self.gradient_reductions:.3g} (compiled)")
        lines.append(f"  fits = {self.fits}: {self.fits_reason}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])


def _plain(value: Any) -> Any:
    """Records as dictionaries, tuples as lists; (kind, bytes) pairs as a dictionary."""
    if isinstance(value, Moment):
        return {**_fields(value), "by_kind": dict(value.by_kind)}
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}
