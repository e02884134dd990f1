"""From an exception to one paragraph and an exit code."""

import dataclasses
import os
import traceback

from jaxmem._blame import is_jax_refusal
from jaxmem._source import is_users as _is_users
from jaxmem.errors import BudgetInfeasible, DoesNotFitError, JaxmemError

DONE, DOES_NOT_FIT, BAD_INPUT, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130
LONGEST_MESSAGE = 1200  # characters; an XLA error may run to tens of thousands
DEBUG_HINT = "Run again with --debug for the traceback."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What the command line says and returns: `text` is one paragraph, empty when silence is right."""

    exit_code: int
    text: str


def explain(error: BaseException) -> Problem:
    """Sorts an exception by whose fault it is.

    >>> from jaxmem.errors import BatchError
    >>> explain(BatchError(wanted="rows", got="none", do="Add rows."))
    Problem(exit_code=2, text='jaxmem: error: Wanted rows; got none. Add rows.')
    """
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # click's name for Ctrl-C
        return Problem(exit_code=INTERRUPTED, text="jaxmem: stopped by Ctrl-C")
    if isinstance(error, (DoesNotFitError, BudgetInfeasible)):
        return Problem(exit_code=DOES_NOT_FIT, text=f"jaxmem: does not fit: {paragraph(str(error))}")
    if isinstance(error, JaxmemError):
        return Problem(exit_code=BAD_INPUT, text=f"jaxmem: error: {paragraph(str(error))}")
    if hasattr(error, "format_message"):  # a usage error of click, which typer may carry under its own name
        return _usage_problem(error)
    what = describe(error)
    if "RESOURCE_EXHAUSTED" in what:
        return Problem(
            exit_code=DOES_NOT_FIT,
            text=f"jaxmem: does not fit: {what} Try more --accumulation-steps, --remat full or --precision bfloat16.",
        )
    frame = users_frame(error)
    if frame is not None:
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}"
        return Problem(exit_code=BAD_INPUT, text=f"jaxmem: error: {what} Raised from {where}. {DEBUG_HINT}")
    if is_jax_refusal(error):
        return Problem(exit_code=BAD_INPUT, text=f"jaxmem: error: {what} {DEBUG_HINT}")
    return Problem(exit_code=INTERNAL, text=f"jaxmem: internal error: {what} {DEBUG_HINT}")


def describe(error: BaseException) -> str:
    """`TypeError: what it says.` as one sentence of bounded length.

    >>> describe(KeyError("x"))
    "KeyError: 'x'."
    """
    message = paragraph(str(error))
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def paragraph(text: str) -> str:
    """`text` on one line, cut to `LONGEST_MESSAGE`."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}…"


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame in code that belongs neither to jaxmem, an installed package, nor Python."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return frames[-1] if frames else None


def _usage_problem(error) -> Problem:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed already
        return Problem(exit_code=BAD_INPUT, text="")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "jaxmem"
    message = paragraph(error.format_message())
    message = message if message.endswith((".", "?", "!", ")")) else f"{message}."
    return Problem(exit_code=BAD_INPUT, text=f"jaxmem: error: {message} See `{command} --help`.")
