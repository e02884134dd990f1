"""`jaxmem explain-oom`: what an out-of-memory text says, and what to try first."""

import pathlib
import sys
from typing import Annotated

import typer

from jaxmem.cli._options import Debug, JsonOut
from jaxmem.cli._output import STDOUT, Outputs


def explain_oom(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log file, or - for stdin.", show_default=False)],
    json_out: JsonOut = None,
    debug: Debug = False,
):
    """Explain an out-of-memory error: whose memory, how much, which buffers, and what to try first.

    Nothing runs and no device is touched. Exit code 2 says that the log reports no out-of-memory.
    """
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out})
    outputs.check(inputs=(log,))
    start_jax()  # nothing runs; the records' package imports it
    from jaxmem.analysis.oom import explain_oom as explain
    from jaxmem.report.oom import render_oom

    said = explain(sys.stdin.buffer if log == STDOUT else pathlib.Path(log))
    outputs.write(sys.stdout, {"--json": said.to_json})
    outputs.show(render_oom(said))
