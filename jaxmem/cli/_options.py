"""The options that several verbs share, but for those that set a field of the config: `_fields.py`."""

from typing import Annotated

import typer

from jaxmem.cli._completion import complete_function, complete_target

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE[:FUNCTION]",
        help="A Python file and its function that returns a jaxmem.Workload (default: workload).",
        show_default=False,
        autocompletion=complete_function,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="T",
        help="What to compile for: local, cpu, or a chip that need not be here, such as tpu-v5e:2x2 or gpu-h100; "
        "`jaxmem targets` lists them.",
        show_default="local",
        autocompletion=complete_target,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An option of FUNCTION. For several repeat --set, or separate them by commas: seq=512,layers=4.",
        show_default=False,
    ),
]
JsonOut = Annotated[
    str | None,
    typer.Option("--json", metavar="OUT", help="Write the result as JSON to a file, or to stdout for -."),
]
HtmlOut = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="OUT", help="Write a page that needs no network and no other file, or - for stdout."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
