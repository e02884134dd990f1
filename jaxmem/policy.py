"""`Policy`: which values of a block are saved for the backward pass; and the presets by name."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxmem._shown import Brief
from jaxmem._suggest import did_you_mean, named_fields
from jaxmem.budget import PREFIX, parse_budget
from jaxmem.errors import ConfigError, UnknownPolicyError

Fate = Literal["save", "offload", "recompute"]
FATES: tuple[Fate, ...] = ("save", "offload", "recompute")
REGEX = "re:"  # a pattern with this prefix is a regular expression for the whole name
_DOTS = ("none", "no_batch", "all")  # each keeps what the one before it keeps


@named_fields()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(Brief):
    """Which values a block saves for its backward pass; equal by value, hashable, with a JSON round trip.

    `|` combines policies. The order of patterns does not matter: they are stored sorted.

    `jax.ad_checkpoint.checkpoint_name(x, name)` gives a value its name. A pattern is an exact name ("qkv_proj"), or
    "re:" and a regular expression for the whole name ("re:(q|k|v)_proj"). Each exact name must exist in the loss; for
    a regular expression one match is enough (`UnmatchedNamesError`). If an exact name and a regular expression match
    the same value, the exact name wins.

    Args:
      save: patterns of values that stay on the device.
      offload: patterns of values that are moved to host memory.
      recompute: exceptions to regular expressions of `save` and `offload`.
      dots: "none"; "no_batch" saves the outputs of matrix products without batch dimensions;
        "all" saves those of all matrix products and convolutions.
      rest: the fate of every other value: "recompute" or "save".

    Raises:
      ConfigError: a name has two fates, or `recompute` is combined with dots or rest="save": JAX has saved the value
        of a name before it sees the name.

    >>> policy = Policy(dots="no_batch") | Policy(offload=("re:(q|k|v)_proj",))
    >>> policy.fate("q_proj"), policy.fate("mlp"), Policy.from_json(policy.to_json()) == policy
    ('offload', None, True)
    >>> preset("dots") | preset("full") == preset("dots")
    True
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    dots: Literal["none", "no_batch", "all"] = "none"
    rest: Literal["recompute", "save"] = "recompute"

    def __post_init__(self):
        for field in FATES:
            object.__setattr__(self, field, _patterns(field, getattr(self, field)))
        for field, allowed in (("dots", _DOTS), ("rest", ("recompute", "save"))):
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    wanted=f"{field} to be one of {', '.join(allowed)}",
                    got=repr(getattr(self, field)),
                    do="Choose one of them.",
                )
        for i, one in enumerate(FATES):
            for other in FATES[i + 1 :]:
                both = sorted(set(getattr(self, one)) & set(getattr(self, other)))
                if both:
                    raise _conflict(", ".join(map(repr, both)), (one, other))
        if self.recompute and (self.dots != "none" or self.rest == "save"):
            raise ConfigError(
                wanted="recompute to make exceptions to regular expressions of save and offload only",
                got=f"recompute={self.recompute!r} with dots={self.dots!r} and rest={self.rest!r}",
                do="JAX decides on the operation that makes a value before it sees the value's name, so a name cannot "
                "take back what a dots rule or rest='save' has kept. List what to keep by name instead.",
            )

    def fate(self, name: str) -> Fate | None:
        """The fate of a name by the patterns: "save", "offload", "recompute", or None if no pattern matches.

        Raises:
          ConfigError: regular expressions of two fates match it.
        """
        return _fate(self, name)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of all fates."""
        return (*self.save, *self.offload, *self.recompute)

    @property
    def keeps_everything(self) -> bool:
        """Whether every value stays on the device, so that the policy changes nothing."""
        return self.rest == "save" and not self.offload

    def __or__(self, other: "Policy") -> "Policy":
        """The policy that saves and offloads what either does; ConfigError if they disagree on a name."""
        if not isinstance(other, Policy):
            return NotImplemented
        return Policy(
            save=(*self.save, *other.save),
            offload=(*self.offload, *other.offload),
            recompute=(*self.recompute, *other.recompute),
            dots=self.dots if _DOTS.index(self.dots) >= _DOTS.index(other.dots) else other.dots,
            rest="save" if "save" in (self.rest, other.rest) else "recompute",
        )

    def to_json(self) -> str:
        """One line of JSON; `from_json` makes an equal policy from it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """The policy that `to_json` wrote."""
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(wanted="a Policy as JSON", got=f"invalid JSON ({error})", do="Check the text.") from None
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Any) -> "Policy":
        """The policy with the fields of a JSON object; ConfigError for an unknown field."""
        if not isinstance(fields, dict):
            known = [field.name for field in dataclasses.fields(cls)]
            raise ConfigError(
                wanted=f"a JSON object with fields of Policy: {', '.join(known)}",
                got=repr(fields)[:200],
                do='Write for example {"save": ["qkv_proj"], "dots": "no_batch"}.',
            )
        return cls(**fields)

    def __str__(self) -> str:
        """A preset's name, else the fields that differ from their defaults.

        >>> print(preset("dots"), "/", Policy(save=("a", "b"), dots="no_batch"))
        dots / save=a,b dots=no_batch
        """
        setting = shortest(self)
        if isinstance(setting, str):
            return setting
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{k}={','.join(v) if isinstance(v, tuple) else v}" for k, v in values.items())


@functools.lru_cache(maxsize=4096)  # asked once for each named value of each trace
def _fate(policy: Policy, name: str) -> Fate | None:
    for fate in FATES:
        if name in getattr(policy, fate):
            return fate
    claims: list[Fate] = [
        fate for fate in FATES if any(is_regex(p) and matches(p, name) for p in getattr(policy, fate))
    ]
    if len(claims) > 1:
        raise _conflict(repr(name), claims)
    return claims[0] if claims else None


def is_regex(pattern: str) -> bool:
    """Whether a pattern is a regular expression."""
    return pattern.startswith(REGEX)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is, or matches the whole of, a name.

    >>> matches("re:.*_proj", "q_proj"), matches("re:proj", "q_proj"), matches("q_proj", "q_proj")
    (True, False, True)
    """
    if is_regex(pattern):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    return pattern == name


def _patterns(field: str, value) -> tuple[str, ...]:
    """The distinct patterns, sorted and checked."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(
            wanted=f"{field} to be a tuple of names",
            got=repr(value)[:200],
            do=f"Write {field}=({value!r},) for one name." if isinstance(value, str) else f"Write {field}=('name',).",
        )
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or pattern in ("", REGEX):
            raise ConfigError(
                wanted=f'{field} to hold names, or regular expressions behind "{REGEX}"',
                got=repr(pattern)[:200],
                do="Use the string given to checkpoint_name.",
            )
        if is_regex(pattern):
            try:
                re.compile(pattern.removeprefix(REGEX))
            except re.error as error:
                raise ConfigError(
                    wanted=f'a regular expression behind "{REGEX}" in {field}',
                    got=f"{pattern!r} ({error})",
                    do="Correct it; re.escape quotes a name.",
                ) from None
    return tuple(sorted(set(patterns)))


def _conflict(what: str, fates) -> ConfigError:
    return ConfigError(
        wanted="one fate for each name", got=f"{what} in both {' and '.join(fates)}", do="Leave it in one of them."
    )


# MaxText's lists hold alternatives (a model has either query_proj or qkv_proj), so each list is one expression.
_QKV = "query_proj|key_proj|value_proj|qkv_proj"
_MLP = "mlpwi|mlpwi_0|mlpwi_1|mlpwo"


def _any(*names: str) -> tuple[str]:
    return (f"{REGEX}{'|'.join(names)}",)


PRESETS: dict[str, Policy] = {
    "none": Policy(rest="save"),
    "full": Policy(),
    "dots": Policy(dots="all"),
    "dots_no_batch": Policy(dots="no_batch"),
    "minimal": Policy(save=_any(_QKV, "out_proj", _MLP)),
    "minimal_with_context": Policy(save=_any(_QKV, "out_proj", _MLP, "context")),
    "save_dot_with_context_except_mlp": Policy(save=_any(_QKV, "out_proj", "context")),
    "save_dot_except_mlpwi": Policy(save=_any(_QKV, "out_proj", "mlpwo")),
    "save_dot_except_mlp": Policy(save=_any(_QKV, "out_proj")),
    "save_qkv_proj": Policy(save=_any(_QKV)),
    "save_out_proj": Policy(save=_any("out_proj")),
    "qkv_proj_offloaded": Policy(offload=_any(_QKV)),
    "minimal_offloaded": Policy(offload=_any(_QKV, "out_proj", _MLP)),
    "save_qkv": Policy(save=_any(_QKV)),
}

# What `jax.checkpoint_policies` and others call them.
_OTHER_NAMES = {
    "auto": "auto:6GiB or auto:0.25",
    "everything_saveable": "none",
    "off": "none",
    "nothing_saveable": "full",
    "checkpoint": "full",
    "remat": "full",
    "dots_saveable": "dots",
    "dots_with_no_batch_dims_saveable": "dots_no_batch",
}


def preset(name: str) -> Policy:
    """The policy of a preset.

    "none" saves everything, "full" only a block's inputs; "dots" and "dots_no_batch" follow the dots rules. The others
    are MaxText's; the model must use at least one of their names.

    Raises:
      UnknownPolicyError: there is no preset of that name.

    >>> preset("save_out_proj").fate("out_proj")
    'save'
    """
    if not isinstance(name, str) or name not in PRESETS:
        close = did_you_mean(name, PRESETS, aliases={**_OTHER_NAMES, **_budget_in(name)})
        raise UnknownPolicyError(
            wanted=f"a remat preset ({', '.join(PRESETS)}) or a Policy",
            got=repr(name),
            do=f"{close}Choose one of these presets, pass jaxmem.Policy(save=(...)), or give a "
            'MemoryConfig a budget, remat="auto:6GiB" or "auto:0.25".',
        )
    return PRESETS[name]


def _budget_in(name: Any) -> dict[str, str]:
    """A budget without its "auto:", and what was probably meant by it."""
    if not isinstance(name, str) or not (text := name.strip())[:1].isdigit():
        return {}
    try:
        return {text.lower(): f"{PREFIX}{parse_budget(text)}"}
    except ConfigError:
        return {}


def as_policy(remat: str | Policy) -> Policy:
    """The policy of a remat setting, which is a preset's name or a policy."""
    return remat if isinstance(remat, Policy) else preset(remat)


def shortest(policy: Policy) -> str | Policy:
    """The shortest remat setting for a policy: the name of the first preset that equals it, else the policy.

    >>> shortest(Policy(dots="all")), shortest(Policy(save=("a",))).save
    ('dots', ('a',))
    """
    return next((name for name, known in PRESETS.items() if known == policy), policy)
