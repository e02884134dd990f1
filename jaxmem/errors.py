"""The exception tree: every class names one cause, every message says wanted, got and what to do."""

from jaxmem._cell import render


class JaxmemError(Exception):
    """Base of all jaxmem errors.

    Args:
      wanted: what was expected.
      got: what was found, with the offending name, path or number.
      do: the next thing to try.
    """

    def __init__(self, *, wanted: str, got: str, do: str):
        self.wanted, self.got, self.do = wanted, got, do
        super().__init__(f"Wanted {wanted}; got {got}. {do}")

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return render(self)

    def __reduce__(self):
        return _rebuild, (type(self), self.wanted, self.got, self.do)


def _rebuild(cls, wanted, got, do):
    return cls(wanted=wanted, got=got, do=do)


class InputError(JaxmemError, ValueError):
    """The caller's input is wrong; the command line exits with code 2."""


class ConfigError(InputError):
    """A `MemoryConfig` or `Precision` field has a value that cannot be honoured."""


class UnknownFieldError(ConfigError, TypeError):
    """A config has no field of this name, or is given a field without its name."""


class UnknownPolicyError(ConfigError):
    """There is no remat preset of this name."""


class PolicyNotHonoured(ConfigError):
    """The installed JAX, or the device, would ignore a remat policy."""


class UnmatchedNamesError(ConfigError):
    """No block has a value of a name in the remat policy while it is differentiated."""


class WorkloadError(InputError):
    """A `Workload` has a field of the wrong kind, or lacks one that is needed."""


class IntegerParameterError(WorkloadError):
    """A parameter to be differentiated has an integer, boolean or key dtype."""


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
    """A remat setting changes nothing: the residuals are those of the plain step."""


class BudgetInfeasible(JaxmemError):
    """No choice of residuals stays within a budget; the message says what the smallest choice needs."""


class DecisionError(InputError):
    """A stored decision of a remat budget was made for other blocks, or is damaged; nothing of it was applied."""


class RematWarning(UserWarning):
    """A remat setting takes effect, but saves nothing, or less than it seems to."""

    def __init__(self, message: str):
        super().__init__(message)


class MemoryWarning(UserWarning):
    """Training took more or less memory than its compiled step needs."""

    def __init__(self, message: str):
        super().__init__(message)


class SettingWarning(UserWarning):
    """A setting has no effect."""

    def __init__(self, message: str):
        super().__init__(message)


class PrecisionWithoutEffect(InputError):
    """No value of the traced loss has the compute dtype."""


class UnknownTargetError(InputError):
    """This version cannot compile for a target of this name."""


class NonFiniteError(InputError):
    """Training produced a NaN or an infinity."""


class TooManySkippedWindows(NonFiniteError):
    """Too many windows in a row had a loss or gradients that were not finite; no loss scale can fix that."""


class CheckpointError(InputError):
    """Checkpoints cannot be written to, or read from, a folder."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint, or what it says of itself, is not what was written."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint holds other leaves than those wanted: paths, shapes or dtypes."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, or something was cleaned up."""

    def __init__(self, message: str):
        super().__init__(message)


class FileLoadError(InputError):
    """A FILE[:FUNCTION] cannot be loaded as a `Workload`."""


class MissingCompilerError(InputError):
    """A target's compiler is not installed, or does not match the installed JAX."""


class UnsupportedByChip(InputError):
    """A program compiles for a chip that cannot run it."""


class MiscompiledError(InputError):
    """A compiler of a known version compiled a program that computes wrong numbers."""


class RetargetError(InputError):
    """A program is tied to devices of this machine, so it cannot be compiled for others."""


class ProcessError(InputError):
    """The processes of one program cannot meet, or are given different things to do."""


class MeshError(InputError):
    """Arrays, a step or `jax.set_mesh` use different meshes, which one program cannot."""


class NotEquivalentError(JaxmemError, AssertionError):
    """A configuration does not compute the same as the plain step."""


class DoesNotFitError(JaxmemError):
    """The target's compiler refused a program that needs more memory than a device has.

    `needed_bytes` and `available_bytes` are the compiler's numbers, None if it gave none; `text` is its whole error.
    """

    needed_bytes: int | None = None
    available_bytes: int | None = None
    text: str = ""
