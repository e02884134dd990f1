"""The exception tree: every class names one cause, every message says wanted, got and what to do."""


class JaxmemError(Exception):
    """Base of all jaxmem errors.

    Args:
      wanted: what would have been right.
      got: what was found instead, with the offending name, path or number.
      do: the next thing to try.
    """

    def __init__(self, *, wanted: str, got: str, do: str):
        self.wanted, self.got, self.do = wanted, got, do
        super().__init__(f"Wanted {wanted}; got {got}. {do}")

    def __reduce__(self):
        return _rebuild, (type(self), self.wanted, self.got, self.do)


def _rebuild(cls, wanted, got, do):
    return cls(wanted=wanted, got=got, do=do)


class InputError(JaxmemError, ValueError):
    """The caller's input is wrong; the command line exits with code 2."""


class ConfigError(InputError):
    """A `MemoryConfig` or `Precision` field has a value that cannot be honoured."""


class UnknownPolicyError(ConfigError):
    """A remat preset that does not exist."""


class PolicyNotHonoured(ConfigError):
    """A remat policy that the installed JAX, or the device, would ignore."""


class UnmatchedNamesError(ConfigError):
    """A name of a remat policy that no block offers while it is differentiated."""


class WorkloadError(InputError):
    """A `Workload` is of the wrong shape, or lacks what was asked of it."""


class IntegerParameterError(WorkloadError):
    """Something that is to be differentiated has an integer, boolean or key dtype."""


class BatchError(InputError):
    """A batch cannot be cut into micro-batches: empty, uneven, or its leaves disagree."""


class ObjectiveError(InputError):
    """A loss returned something that is not an objective, or one that cannot be accumulated."""


class DifferentiableWeight(ObjectiveError):
    """A weight depends on the parameters being differentiated, so normalising by it is not exact."""


class MetricError(ObjectiveError):
    """A metric lacks a declared reduction."""


class StateError(InputError):
    """The state a loss returned cannot be carried to the next micro-batch."""


class RematWithoutEffect(InputError):
    """A remat setting that changes nothing: the residuals are those of the plain step."""


class BudgetInfeasible(JaxmemError):
    """No choice of residuals stays within a budget; says what the smallest needs."""


class RematWarning(UserWarning):
    """A remat setting that takes effect, but saves nothing, or less than it seems to."""

    def __init__(self, message: str):
        super().__init__(message)


class SettingWarning(UserWarning):
    """A setting that does nothing here."""

    def __init__(self, message: str):
        super().__init__(message)


class PrecisionWithoutEffect(InputError):
    """A compute dtype that no value of the traced loss has."""


class UnknownTargetError(InputError):
    """A target name that this version cannot compile for."""


class NonFiniteError(InputError):
    """Training produced a NaN or an infinity."""


class TooManySkippedWindows(NonFiniteError):
    """Window after window was skipped, as its loss or gradients were not finite; no loss scale mends that."""


class FileLoadError(InputError):
    """A FILE[:FUNCTION] that cannot be loaded as a `Workload`."""


class MissingCompilerError(InputError):
    """A target's compiler is not installed, or is not of the installed JAX's version."""


class UnsupportedByChip(InputError):
    """A program that compiles for a chip which cannot run it."""


class MiscompiledError(InputError):
    """A program that its compiler, of a known version, made to compute wrong numbers."""


class RetargetError(InputError):
    """A program that is tied to devices of this machine, so that it cannot be compiled for others."""


class MeshError(InputError):
    """Arrays, or a step and its surroundings, that lie on meshes which no program can have at once."""


class NotEquivalentError(JaxmemError, AssertionError):
    """A configuration computes something else than the plain step."""


class DoesNotFitError(JaxmemError):
    """The target's compiler refused a program that needs more memory than a device has.

    `needed_bytes` and `available_bytes` are the compiler's, None where it did not say; `text` is all that it said.
    """

    needed_bytes: int | None = None
    available_bytes: int | None = None
    text: str = ""
