"""A decision as JSON: which values of which blocks are kept, of blocks that are told apart by what they are.

The text says of each distinct block its values, by index, and what is kept of them, with name and source line. It is
put back by finding the blocks of the program anew; what is not the same there is an error that names it.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmem._installed import version
from jaxmem._settled import Settled
from jaxmem._source import short_place
from jaxmem.errors import DecisionError
from jaxmem.jaxprs import origin
from jaxmem.remat.auto._assignment import Assignment, assigned, in_segments
from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._content import Content, Kind, content_of, digest
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._rates import Rates
from jaxmem.targets import Tiles

FORMAT = 1
_ANEW = "or leave the decision out, so that the budget is solved anew"
_FIGURES = ("kept_bytes", "host_bytes", "working_bytes", "recompute_flops", "recompute_seconds", "price", "bound")
_DIGEST = "digest"  # of all else
_BY_DTYPE = "matmul_flops_per_second"  # pairs, which JSON has as an object
_TILES = "tiles"  # of the chip, beside its rates; decisions of an older jaxmem know none
_NAMED = 3  # blocks that an error names


def versions() -> dict[str, str | None]:
    """Of the packages that decide what a program is traced to."""
    return {name: version(name) for name in ("jaxmem", "jax", "jaxlib")}


def decision_hash(content: Content, assignment: Assignment) -> str:
    """Equal for decisions that make the same program of the same blocks."""
    choices = {name: [choice.kept, choice.offloaded] for name, choice in assignment.choices.items()}
    return digest({"problem": content.hash, "choices": choices, "segments": assignment.segments})


def stored_form(problem: Problem, assignment: Assignment, compiled: Mapping[str, Any]) -> dict[str, Any]:
    """A decision as JSON-ready values.

    Args:
      problem: the blocks.
      assignment: the choice for each.
      compiled: what is known of the program that was compiled for it.
    """
    content = content_of(problem)
    form = {
        "format": FORMAT,
        "hash": decision_hash(content, assignment),
        "versions": versions(),
        **compiled,
        "modelled": {name: getattr(assignment, name) for name in _FIGURES},
        "shards": problem.shards,
        "rates": _rates(problem.rates),
        _TILES: None if problem.rates.tiles is None else dataclasses.asdict(problem.rates.tiles),
        "segments": {name: list(sizes) for name, sizes in assignment.segments.items()},
        "scans": content.scans,
        "others": list(content.others),
        "kinds": [
            {**dataclasses.asdict(kind), "choices": list(_choices(problem, at, kind, assignment))}
            for at, kind in enumerate(content.kinds)
        ],
    }
    return {**form, _DIGEST: digest(form)}


def _rates(rates: Rates) -> dict[str, Any]:
    told = dataclasses.asdict(rates) | {_BY_DTYPE: dict(rates.matmul_flops_per_second)}
    return {name: value for name, value in told.items() if name != _TILES}


def _choices(problem: Problem, at: int, kind: Kind, assignment: Assignment) -> Iterator[dict[str, Any]]:
    """The choices for blocks that are alike, each with the blocks that take it."""
    forward, values = problem.groups[at].candidates.forward, problem.groups[at].candidates.values

    def told(index: int) -> dict[str, Any]:
        made = origin(forward.jaxpr, values[index])
        known = {"name": made.name, "source": short_place(made.source)}
        return {"value": index, "is": kind.values[index], **{key: text for key, text in known.items() if text}}

    blocks: dict[Choice, list[str]] = {}
    for name in kind.blocks:
        blocks.setdefault(assignment.choices[name], []).append(name)
    for choice, names in blocks.items():
        yield {"blocks": names, "keep": [*map(told, choice.kept)], "offload": [*map(told, choice.offloaded)]}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """A decision that was read; whether a program has its blocks shows when it is put back.

    Args:
      fields: as `stored_form` wrote them.
      content: the blocks that it was made for.
      choices: by the block's name.
      segments: as of `Assignment`.
      rates: of the chip that it was priced for.
    """

    fields: Mapping[str, Any]
    content: Content
    choices: dict[str, Choice]
    segments: dict[str, tuple[int, ...]]
    rates: Rates

    @classmethod
    def read(cls, text: str) -> "Stored":
        """A decision from its JSON.

        Raises:
          DecisionError: the text is none, is damaged, or was written by a newer jaxmem.
        """
        try:
            fields = json.loads(text)
            written = fields["format"]
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise _damaged(f"other text ({type(error).__name__}: {error})") from None
        if written != FORMAT:
            raise DecisionError(
                wanted=f"a decision in format {FORMAT}",
                got=f"format {written!r}, written by jaxmem {_version(fields, 'jaxmem')}",
                do=f"Install that version of jaxmem, {_ANEW}.",
            )
        try:
            stored = cls._of(fields)
            same = fields["hash"] == stored.hash and fields.pop(_DIGEST) == digest(fields)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise _damaged(f"one without its parts ({type(error).__name__}: {error})") from None
        if not same:
            raise _damaged("one that was changed since: its digest is another's")
        return stored

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> "Stored":
        if not (isinstance(fields["peak_bytes"], int | None) and isinstance(fields["program"], str | None)):
            raise TypeError("a peak that is no number of bytes")
        Settled.read(fields.get("settled", {}))
        kinds, choices = [], {}
        for kind in fields["kinds"]:
            values = tuple(kind["values"])
            alike = {name: kind[name] for name in ("times", "last", "structure")}
            kinds.append(Kind(blocks=tuple(kind["blocks"]), values=values, **alike))
            for one in kind["choices"]:
                kept, offloaded = (tuple(each["value"] for each in one[fate]) for fate in ("keep", "offload"))
                if any(values[each["value"]] != each["is"] for each in (*one["keep"], *one["offload"])):
                    raise ValueError("a value that is another one")
                choices |= dict.fromkeys(one["blocks"], Choice(kept=kept, offloaded=offloaded))
        content = Content(kinds=tuple(kinds), others=tuple(fields["others"]), scans=dict(fields["scans"]))
        tiles = fields.get(_TILES)
        rates = fields["rates"] | {_BY_DTYPE: tuple(fields["rates"][_BY_DTYPE].items())}
        rates |= {_TILES: None if tiles is None else Tiles(**tiles)}
        segments = {name: tuple(sizes) for name, sizes in fields["segments"].items()}
        return cls(fields=fields, content=content, choices=choices, segments=segments, rates=Rates(**rates))

    @property
    def hash(self) -> str:
        """As of `ResidualPlan.hash`."""
        return decision_hash(self.content, self)  # pyright: ignore[reportArgumentType]

    @property
    def settled(self) -> Settled:
        """The form of the step in which its blocks were found; as written, where an older jaxmem does not say."""
        return Settled.read(self.fields.get("settled", {}))

    @property
    def jax(self) -> str:
        """The version of JAX that it was made with."""
        return _version(self.fields, "jax")

    def assignment(self, problem: Problem) -> Assignment:
        """The choices for the same blocks, found anew, with what they cost there.

        Raises:
          DecisionError: the blocks are not the same; names what differs.
        """
        found = content_of(problem)
        if found.hash != self.content.hash:
            now = versions()["jax"]
            other = f", with jax {self.jax} (this is {now})" if now != self.jax else ""
            raise DecisionError(
                wanted="the blocks that the stored decision of a remat budget was made for",
                got=_difference(self.content, found),
                do=f"Use the model, the batch and the config that it was made for{other}, {_ANEW}.",
            )
        choices = {name: self.choices[name] for name in problem.group_of}
        made = assigned(problem, choices)
        if self.segments:
            made = in_segments(problem, made, self.segments, objective="seconds")
        if problem.shards != self.fields["shards"]:
            return made
        # What it was solved for may have been FLOPs.
        figures = self.fields["modelled"]
        return dataclasses.replace(made, price=figures["price"], bound=figures["bound"])


def _damaged(got: str) -> DecisionError:
    return DecisionError(
        wanted="a decision of a remat budget, as ResidualPlan.to_json wrote it",
        got=got,
        do=f"Give the text unchanged, {_ANEW}.",
    )


def _version(fields: Mapping[str, Any], package: str) -> str:
    found = fields.get("versions")
    return str(found.get(package)) if isinstance(found, Mapping) else "unknown"


def _difference(wanted: Content, found: Content) -> str:
    """What the blocks of two problems differ in, in words."""
    old, new = ({name: kind for kind in content.kinds for name in kind.blocks} for content in (wanted, found))
    gone, more = _named([name for name in old if name not in new]), _named([name for name in new if name not in old])
    if gone or more:
        parts = [f"without {gone}"] * bool(gone) + [f"with {more} besides"] * bool(more)
        return f"a program {' and '.join(parts)}"
    told = [(name, text) for name in old if (text := _unlike(old[name], new[name]))]
    if not told:
        return f"scans of other lengths: {found.scans}, not {wanted.scans}"
    count = len(told) - 1
    more = f"; {count} more block{'s differ' if count > 1 else ' differs'}" if count else ""
    return f"block {told[0][0]!r} with {told[0][1]}{more}"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    plural = "s" if len(names) > 1 else ""
    return f"block{plural} {', '.join(map(repr, names[:_NAMED]))}{more}" if names else ""


def _unlike(old: Kind, new: Kind) -> str:
    """How a block differs from what it was; "" where it does not."""
    for i, (before, after) in enumerate(itertools.zip_longest(old.values, new.values)):
        if before != after:
            return f"{after or 'nothing'} as its value {i}, which was {before or 'not there'}"
    if old.times != new.times:
        return f"{new.times} runs, which were {old.times}"
    if (old.structure, old.last) != (new.structure, new.last):
        return "the same values, but made of one another in another way"
    return ""
