"""From an exception to one paragraph and an exit code."""

import dataclasses
import os

from jaxmem._blame import is_jax_refusal, named, paragraph, users_frame
from jaxmem.errors import BudgetInfeasible, DoesNotFitError, JaxmemError

DONE, DOES_NOT_FIT, BAD_INPUT, INTERNAL, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
DEBUG_HINT = "Run again with --debug for the traceback."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What the command line says and returns: `text` is one paragraph, empty where nothing is to be said."""

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
    text = named(error)
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def _usage_problem(error) -> Problem:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed already
        return Problem(exit_code=BAD_INPUT, text="")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "jaxmem"
    message = paragraph(error.format_message())
    message = message if message.endswith((".", "?", "!", ")")) else f"{message}."
    return Problem(exit_code=BAD_INPUT, text=f"jaxmem: error: {message} See `{command} --help`.")
