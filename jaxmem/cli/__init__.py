"""The command line: `analyze`, `compare`, `residuals`, `train` and `doctor`, one file a verb.

Exit codes: 0 done; 1 does not fit, or a check failed; 2 bad input; 3 a fault of jaxmem itself;
130 stopped by Ctrl-C. An error is one paragraph on stderr; `--debug` adds the traceback.
"""

from jaxmem.cli._app import main as main

__all__ = ["main"]
