"""What `verify` found: each promise of a config, with its verdict."""

import dataclasses
from typing import Any, Literal

from jaxmem._shown import Brief, JsonRecord

Verdict = Literal["pass", "fail", "uncertain"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Brief):
    """One promise.

    Args:
      name: "gradients", "loss", "state", "backend", "compiler", "residuals", "temps", "host" or
        "recompute".
      verdict: "uncertain" where nobody could tell; `detail` says why.
      detail: one sentence with the numbers.
    """

    name: str
    verdict: Verdict
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification(JsonRecord, identity=("name", "target", "verdict", "gradient_error", "reference")):
    """A configured step against its plain reference. None where a number is not known or was not asked for.

    Args:
      name: of the step.
      target: that the bytes were compiled for.
      checks: every promise of the config.
      reference: in words, what the gradients are compared with.
      compared_on: the backend on which gradients were computed, this machine's: "cpu"; empty where they were not.
      gradient_error: relative L2 distance of the worst leaf, and `gradient_path`, which leaf that is.
      gradient_tolerance: what it may be, by the narrowest dtype at work, `tolerance_dtype`.
      loss, reference_loss: their values.
      state_error: as `gradient_error`, of the model state after the step.
      residual_bytes, reference_residual_bytes: of one micro-batch, with and without remat; modelled.
      temp_bytes, reference_temp_bytes: the same program's temporaries on the target; compiled.
      host_temp_bytes, reference_host_temp_bytes: those on the host; compiled.
      asked_recompute_flops: that remat asks for; modelled.
      recompute_flops: found in the compiled program.
      notes: sentences on how it was done.

    >>> check = Check(name="loss", verdict="pass", detail="1.0 against 1.0.")
    >>> Verification(name="full", target="cpu", checks=(check,), reference="the plain step").verdict
    'pass'
    """

    name: str
    target: str
    checks: tuple[Check, ...]
    reference: str
    compared_on: str = ""
    gradient_error: float | None = None
    gradient_path: str = ""
    gradient_tolerance: float | None = None
    tolerance_dtype: str = ""
    loss: float | None = None
    reference_loss: float | None = None
    state_error: float | None = None
    residual_bytes: int | None = None
    reference_residual_bytes: int | None = None
    temp_bytes: int | None = None
    reference_temp_bytes: int | None = None
    host_temp_bytes: int | None = None
    reference_host_temp_bytes: int | None = None
    asked_recompute_flops: int | None = None
    recompute_flops: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """ "fail" if any promise is broken, else "uncertain" if any could not be checked, else "pass"."""
        verdicts = {check.verdict for check in self.checks}
        return "fail" if "fail" in verdicts else "uncertain" if "uncertain" in verdicts else "pass"

    @property
    def passed(self) -> bool:
        """Whether no promise is broken; some may not have been checked, see `verified`."""
        return self.verdict != "fail"

    @property
    def verified(self) -> bool:
        """Whether every promise was checked and holds; not so for a target that is not here: its program never ran."""
        return self.verdict == "pass"

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """The fields and the verdict as JSON-ready values."""
        fields = dataclasses.asdict(self)
        fields |= {"checks": list(fields["checks"]), "notes": list(self.notes)}
        return {"verdict": self.verdict, **fields}
