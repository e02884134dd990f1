"""The options that several verbs share, and the `MemoryConfig` they add up to."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from jaxmem.cli._completion import complete_dtype, complete_function, complete_remat, complete_target
from jaxmem.policy import PRESETS

if TYPE_CHECKING:
    from jaxmem.config import MemoryConfig

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
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="C.json", help="A MemoryConfig as JSON; the options below override it."),
]
AccumulationSteps = Annotated[
    int | None,
    typer.Option("--accumulation-steps", metavar="K", help="Micro-batches per optimizer step.", show_default=False),
]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="DTYPE",
        help="Compute dtype: float32, bfloat16, or float16 with a dynamic loss scale.",
        show_default=False,
        autocompletion=complete_dtype,
    ),
]
Remat = Annotated[
    str | None,
    typer.Option(
        "--remat",
        metavar="PRESET",
        help=f"One of {', '.join(PRESETS)}; or a budget: auto:6GiB for the whole step, auto:0.25 of its residuals.",
        show_default=False,
        autocompletion=complete_remat,
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


def build_config(
    path: str | None, *, accumulation_steps: int | None, precision: str | None, remat: str | None = None
) -> "MemoryConfig":
    """The config of a file (the default one if None) with what the options override.

    Raises:
      ConfigError: the file cannot be read or parsed, or a value cannot be honoured.
    """
    from jaxmem.config import MemoryConfig

    config = MemoryConfig() if path is None else MemoryConfig.from_json(_read(path))
    given = {"accumulation_steps": accumulation_steps, "precision": precision, "remat": remat}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


def _read(path: str) -> str:
    from jaxmem.errors import ConfigError

    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(
            wanted=f"a MemoryConfig as JSON in {path}",
            got=reason,
            do="Write one with MemoryConfig(...).to_json(), or leave --config out.",
        ) from None
