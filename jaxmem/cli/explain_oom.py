"""`jaxmem explain-oom`: what an out-of-memory text says, and what to try first."""

import contextlib
import sys
from typing import Annotated

import typer

from jaxmem.cli._options import Debug, JsonOut
from jaxmem.cli._output import STDOUT, check_writable, write_json


def explain_oom(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log file, or - for stdin.", show_default=False)],
    json_out: JsonOut = None,
    debug: Debug = False,
):
    """Explain an out-of-memory error: whose memory, how much, which buffers, and what to try first.

    Nothing runs and no device is touched. Exit code 2 says that the log reports no out-of-memory.
    """
    check_writable(json_out, "--json")
    from jaxmem.analysis.oom import explain_oom as explain
    from jaxmem.errors import InputError

    with contextlib.ExitStack() as stack:
        if log == STDOUT:
            stream = sys.stdin.buffer
        else:
            try:
                stream = stack.enter_context(open(log, "rb"))
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise InputError(
                    wanted=f"a log file at {log}", got=str(reason), do="Give its path, or - for stdin."
                ) from None
        said = explain(stream)
    if json_out is not None:
        write_json(json_out, said.to_json(), sys.stdout)
    if json_out != STDOUT:
        from rich.console import Console

        from jaxmem.report.oom import render_oom

        Console().print(render_oom(said))
