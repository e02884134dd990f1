"""The options that set a field of `MemoryConfig`: one table, which verbs, help, completion and errors read."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxmem._settled import WORDS
from jaxmem._suggest import did_you_mean
from jaxmem.cli._completion import DTYPES, REMATS, next_of_list
from jaxmem.errors import ConfigError, InputError
from jaxmem.policy import PRESETS

if TYPE_CHECKING:
    from jaxmem.config import MemoryConfig

DEFAULT_PRESETS = "none,full,dots,dots_no_batch"
_CONFIG = "config"  # the option that names a file, `--config`


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldOption:
    """An option that sets a field of `MemoryConfig`.

    Args:
      field: its name; that of the option, with hyphens.
      help: what it does.
      metavar: stands for its value.
      number: whether its value is a whole number, and no text.
      words: what may be written → the field's value; empty where the field takes any text, and checks it.
      offered: by a shell; by default the words.
      list_help: for a verb that takes several, if that is another.
      default: the list of such a verb.
    """

    field: str
    help: str
    metavar: str = "SETTING"
    number: bool = False
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    offered: tuple[str, ...] = ()
    list_help: str = ""
    default: str | None = None

    @property
    def option(self) -> str:
        return "--" + self.field.replace("_", "-")

    def value(self, text: Any) -> Any:
        """The field's value; ConfigError for a word that is none."""
        if self.words and text not in self.words:
            raise ConfigError(
                wanted=f"{self.option} to be one of {', '.join(self.first_words)}",
                got=repr(text),
                do=did_you_mean(text, self.words).strip() or f"Use {self.first_words[0]}.",
            )
        return self.words[text] if self.words else text

    @property
    def takes_list(self) -> bool:
        """Whether a verb may take several of its values."""
        return bool(self.words or self.default)

    @property
    def first_words(self) -> list[str]:
        """One word a value."""
        found: dict[str, str] = {}
        for word, value in self.words.items():
            found.setdefault(repr(value), word)
        return list(found.values())

    def parameter(self, *, several: bool) -> inspect.Parameter:
        """What typer reads."""
        offered = self.offered or tuple(self.words)
        told = (self.list_help or f"{self.help} Several, separated by commas, give rows.") if several else self.help
        option = typer.Option(
            self.option,
            metavar="LIST" if several else self.metavar,
            help=told,
            show_default=bool(several and self.default),
            autocompletion=(lambda incomplete: next_of_list(incomplete, offered)) if offered else None,
        )
        kind: Any = str if several and self.default else int | None if self.number else str | None
        default = self.default if several else None
        where = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.field, where, default=default, annotation=Annotated[kind, option])


# In the order of help, and of the parts of a row's name. The next lever's option is one more entry.
OPTIONS = (
    FieldOption(field="accumulation_steps", metavar="K", number=True, help="Micro-batches per optimizer step."),
    FieldOption(
        field="precision",
        metavar="DTYPE",
        help="Compute dtype: float32, bfloat16, or float16 with a dynamic loss scale.",
        offered=DTYPES,
    ),
    FieldOption(
        field="remat",
        metavar="PRESET",
        help=f"One of {', '.join(PRESETS)}; or a budget: auto:6GiB for the whole step, auto:0.25 of its residuals.",
        list_help=f"Presets, separated by commas, in the order of the rows; of {', '.join(PRESETS)}. Budgets too: "
        "auto:6GiB bounds the compiled peak, auto:0.25 the share of residuals that is kept.",
        offered=REMATS,
        default=DEFAULT_PRESETS,
    ),
    FieldOption(
        field="order",
        help="When weight gradients are made: tied, before the backward pass goes on; free, as the compiler likes; "
        "auto.",
        words={"auto": "auto", "tied": "tied", "free": "free"},
    ),
    FieldOption(
        field="roll",
        help="Whether repeated unrolled layers run as one scan: rolled (true), unrolled (false), auto.",
        words={"auto": "auto", "rolled": True, "unrolled": False, "true": True, "false": False},
    ),
    FieldOption(
        field="random",
        help="Masks of dropout: fenced, drawn once and fused into nothing; free, left to the compiler; auto.",
        words={"auto": "auto", "fenced": "fenced", "free": "free", "unfenced": "free"},
    ),
    FieldOption(
        field="generator",
        help="Of random numbers: given, the key's own; rbg, the hardware's; threefry2x32. Another draws other numbers.",
        words={"given": "given", "rbg": "rbg", "threefry2x32": "threefry2x32"},
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """What a command line says of a `MemoryConfig`.

    Args:
      path: of a config as JSON, which the others override; None without one.
      texts: what the options were given, by field.
    """

    path: str | None = None
    texts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self) -> "MemoryConfig":
        """The one config.

        Raises:
          ConfigError: the file cannot be read or parsed, or a value cannot be honoured.
        """
        given = {each.field: each.value(self.texts[each.field]) for each in OPTIONS if each.field in self.texts}
        return dataclasses.replace(_read(self.path), **given)

    def variants(self) -> dict[str, "MemoryConfig"]:
        """By the name of its row, each combination of what the lists have: "full, tied".

        A row is named by its remat setting and by what not all rows have.

        Raises:
          ConfigError: as of `config`; InputError for an empty list, or one that has a value twice.
        """
        base, lists = _read(self.path), list(self._lists())
        found = {}
        for row in itertools.product(*(values for _, values in lists)):
            given = {each.field: value for (each, _), value in zip(lists, row, strict=True)}
            parts = [
                WORDS.get(each.field, {}).get(value, str(value))
                for (each, values), value in zip(lists, row, strict=True)
                if each.field == "remat" or len(values) > 1
            ]
            found[", ".join(parts)] = dataclasses.replace(base, **given)
        return found

    def _lists(self) -> Iterator[tuple[FieldOption, list[Any]]]:
        # Of rows the remat setting is named first.
        for each in sorted(OPTIONS, key=lambda each: each.default is None):
            text = self.texts.get(each.field)
            if isinstance(text, str):
                wanted = f"different presets, such as {each.default}" if each.default else "different settings"
                values = [each.value(word) for word in split_list(text, each.option, wanted)]
                if len(set(map(repr, values))) < len(values):
                    raise InputError(
                        wanted=f"{each.option} to be a list of different settings", got=text, do="Name each once."
                    )
                yield each, values
            elif text is not None:
                yield each, [text]

    def given(self) -> list[tuple[str, str]]:
        """(option, text) of all that was given."""
        path = [] if self.path is None else [(f"--{_CONFIG}", self.path)]
        return path + [(e.option, str(self.texts[e.field])) for e in OPTIONS if e.field in self.texts]


NONE_GIVEN = Fields()


def sets_fields(*, several: bool = False) -> Callable[[Callable], Callable]:
    """Gives a verb the options of the table, in the place of its parameter `fields`, which it is called with.

    Args:
      several: whether they take lists, all but K and the dtype.
    """

    def decorate(verb: Callable) -> Callable:
        own = inspect.signature(verb, eval_str=True)
        text = "A MemoryConfig as JSON; the options below override it."
        file = Annotated[str | None, typer.Option(f"--{_CONFIG}", metavar="C.json", help=text)]
        where = inspect.Parameter.KEYWORD_ONLY
        options = [inspect.Parameter(_CONFIG, where, default=None, annotation=file)]
        options += [each.parameter(several=several and each.takes_list) for each in OPTIONS]
        parameters = []
        for parameter in own.parameters.values():
            parameters += options if parameter.name == "fields" else [parameter.replace(kind=where)]

        @functools.wraps(verb)
        def called(**given: Any) -> Any:
            path = given.pop(_CONFIG)
            texts = {each.field: given.pop(each.field) for each in OPTIONS}
            texts = {field: text for field, text in texts.items() if text is not None}
            return verb(**given, fields=Fields(path=path, texts=texts))

        called.__signature__ = own.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def split_list(text: str, option: str, wanted: str) -> list[str]:
    """The names of a comma-separated list; an empty or a repeated one is refused.

    >>> split_list("none, full", "--remat", "presets")
    ['none', 'full']
    """
    names = [name.strip() for name in text.split(",")]
    empty = any(len(name.split()) != 1 for name in names)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if empty or repeated:
        raise InputError(
            wanted=f"{option} to be a list of {wanted}",
            got=repr(text) if empty else f"{', '.join(repeated)} more than once",
            do="Separate them by commas, and name each once.",
        )
    return names


def _read(path: str | None) -> "MemoryConfig":
    from jaxmem.config import MemoryConfig

    if path is None:
        return MemoryConfig()
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(
            wanted=f"a MemoryConfig as JSON in {path}",
            got=reason,
            do="Write one with MemoryConfig(...).to_json(), or leave --config out.",
        ) from None
    return MemoryConfig.from_json(text)
