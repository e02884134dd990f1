"""`analyze` and `compare` for workloads, configs and train steps, beside all that `jaxmem.analysis` takes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxmem import analysis
from jaxmem._cell import shortening
from jaxmem._settled import Settled
from jaxmem.analysis import Comparison, MemoryReport, as_program, refuse_arguments
from jaxmem.analysis._progress import Progress
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, InputError, WorkloadError
from jaxmem.policy import Policy
from jaxmem.targets import Target, mesh_of, resolve_target, target_at_hand
from jaxmem.train._forms import spend
from jaxmem.train._policies import PolicyVariant, policy_variants
from jaxmem.train._report import program, report
from jaxmem.train._settle import rivals, settled
from jaxmem.train._spec import StepSpec
from jaxmem.train._step import TrainStep
from jaxmem.workload import Workload


@shortening()
def analyze(
    fn: Any,
    *args: Any,
    config: MemoryConfig | None = None,
    target: str | Target | None = None,
    donate_argnums: Any = (),
    static_argnames: Any = (),
    in_shardings: Any = None,
    arg_kinds: Any = None,
    **keywords: Any,
) -> MemoryReport:
    """What a step, or any function of arrays, needs when compiled for `target`. Nothing is run or allocated.

    Args:
      fn: a `Workload`, with a `MemoryConfig` as the only one of `args` or as `config`; a `TrainStep` alone; or a
        function, jitted or not, a `jax.stages.Traced`, `Lowered` or `Compiled`, as `jaxmem.analysis.analyze` has it.
      *args, **keywords: of a function, arrays or `jax.ShapeDtypeStruct`, nnx objects, static arguments by value.
      target: "local" (None), "cpu", the name of a chip, or a `Target`.
      donate_argnums, static_argnames, in_shardings, arg_kinds: of a function, see `jaxmem.analysis.analyze`.

    Raises:
      InputError: for something that cannot be analysed, or arguments that do not fit it.
      UnknownTargetError: for a target that this version cannot compile for.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import MemoryConfig, Workload, analyze
    >>> workload = Workload(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((4, 4)), jnp.ones((8, 4)), optax.sgd(0.1))
    >>> report = analyze(workload, MemoryConfig(accumulation_steps=2), target="cpu")
    >>> dict(report.by_kind)["parameters"], report.peak_bytes > 64
    (64, True)
    """
    options = {
        "donate_argnums": donate_argnums,
        "static_argnames": static_argnames,
        "in_shardings": in_shardings,
        "arg_kinds": arg_kinds,
    }
    if isinstance(fn, TrainStep):
        refuse_arguments(fn, args, {**options, "config": config, **keywords})
        return report(fn.spec, target)
    if isinstance(fn, Workload):
        given = args if config is None else (*args, config)
        refuse_arguments(fn, given[1:], {**options, **keywords})
        return report(spend(StepSpec.of(fn, *given), target), target)
    if config is not None:
        raise InputError(
            wanted="a Workload beside a config",
            got=f"a {type(fn).__name__}",
            do="Leave config out, or make a Workload of the loss.",
        )
    return analysis.analyze(fn, *args, target=target, **options, **keywords)


@shortening()
def compare(
    variants: Any,
    *arguments: Any,
    policies: Any = None,
    args: tuple[Any, ...] = (),
    target: str | Target | None = None,
    progress: Progress | None = None,
    without_effect: Literal["raise", "refuse"] = "raise",
    forms: Literal["settled", "try"] = "settled",
) -> Comparison:
    """Compiles each variant for one target and puts the reports side by side.

    Every variant is traced, and its remat setting checked, before the first is compiled.

    Args:
      variants: name → `MemoryConfig`, with a `Workload` as the only one of `args`; a `TrainStep`; or what
        `jaxmem.analysis.compare` takes: functions of `args`, lowered or compiled programs. With `policies` one loss, or
        a `Workload`.
      *arguments, args: what all variants are given.
      policies: presets, budgets and `Policy`s, such as ["none", "full", "dots", "auto:0.25"], or a mapping from names
        to these. Each row is the value and gradient of the loss under one of them, applied by `remat.apply`.
      target: "local", "cpu", the name of a chip, or a `Target`. None is "local"; for configs and policies, what
        `target_for` says.
      progress: called with a variant's name and "tracing", "compiling" or "done"; without it a terminal shows a line.
      without_effect: "raise" stops at a remat setting that leaves the residuals unchanged, before the first compile;
        "refuse" leaves it out of the rows, and says so in `refused`.
      forms: "try" adds to each config that leaves its order, roll or masks open a row for each other form that may win
        on the target: "full, tied". A budget of bytes tries them by itself.

    Raises:
      RematWithoutEffect: a remat setting that leaves the residuals unchanged, unless it is to be `refused`.
      InputError: no variants. Whatever the first of them raises, such as BudgetInfeasible, where all are refused;
        where some are not, the others are `refused`.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import MemoryConfig, Workload, compare
    >>> workload = Workload(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((4, 4)), jnp.ones((8, 4)), optax.sgd(0.1))
    >>> table = compare({f"K={k}": MemoryConfig(accumulation_steps=k) for k in (1, 2)}, workload, target="cpu")
    >>> [row.name for row in table.rows]
    ['K=1', 'K=2']

    A loss of your own loop, with all that its gradient keeps:

    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(jnp.tanh(x) @ w)
    ...     return x.sum()
    >>> table = compare(loss, policies=["none", "full"], args=([jnp.ones((4, 4))] * 3, jnp.ones((8, 4))), target="cpu")
    >>> table["none"].saved_residual_bytes > 2 * table["full"].saved_residual_bytes > 0
    True
    """
    given = (*arguments, *args)
    if policies is not None and isinstance(variants, Workload):
        refuse_arguments(variants, given, {})
        named = policy_variants(variants.loss_fn, policies)
        variants, given = {k: MemoryConfig(remat=v.policy) for k, v in named.items()}, (variants,)
    elif policies is not None:
        if not callable(variants) or isinstance(variants, TrainStep):
            raise InputError(
                wanted="a loss, or a Workload, beside policies",
                got=f"a {type(variants).__name__}",
                do="For example jaxmem.compare(loss_fn, policies=['none', 'full'], args=(params, batch)).",
            )
        variants = policy_variants(variants, policies)
    elif callable(variants) or isinstance(variants, Workload):
        raise InputError(
            wanted="policies to compare a loss under, or a mapping from names to variants",
            got=f"{getattr(variants, '__name__', type(variants).__name__)} alone",
            do="For example jaxmem.compare(loss_fn, policies=['none', 'full', 'dots'], args=(params, batch)).",
        )
    levers = (MemoryConfig, PolicyVariant)
    if target is None and isinstance(variants, Mapping) and all(isinstance(each, levers) for each in variants.values()):
        target = target_for(*given)
    if forms == "try" and isinstance(variants, Mapping):
        variants = _with_rivals(variants, given, resolve_target(target))
    plain: dict[MemoryConfig, StepSpec] = {}  # by config without remat, which all its remat settings share

    def make(variant: Any, *args: Any, name: str, target: Target) -> Any:
        if isinstance(variant, TrainStep):
            return program(variant.spec, name, target)
        if isinstance(variant, (str, Policy)) and any(isinstance(arg, Workload) for arg in args):
            raise ConfigError(
                wanted=f"a MemoryConfig named {name!r} beside a Workload",
                got=repr(variant),
                do=f"Write {{{name!r}: MemoryConfig(remat={variant!r})}}.",
            )
        if isinstance(variant, PolicyVariant):
            return variant.program(*args, name=name, target=target)
        form, variant = (variant.form, variant.config) if isinstance(variant, _InForm) else (None, variant)
        if not isinstance(variant, MemoryConfig):
            return as_program(variant, *args, name=name, target=target)
        if len(args) != 1 or not isinstance(args[0], Workload):
            raise WorkloadError(
                wanted="compare({name: MemoryConfig(...)}, workload)",
                got=f"{', '.join(type(arg).__name__ for arg in args) or 'no argument'} beside a MemoryConfig",
                do="Pass the Workload as the only argument after the configs.",
            )
        base = dataclasses.replace(variant, remat="none")
        if base not in plain:
            plain[base] = StepSpec.of(args[0], base)
        spec = plain[base]
        if variant != base:
            spec = dataclasses.replace(spec, config=variant, plain=spec)
        return program(spend(spec if form is None else spec.in_form(form), target), name, target)

    return analysis.compare(
        variants, *given, target=target, progress=progress, make=make, without_effect=without_effect
    )


@dataclasses.dataclass(frozen=True)
class _InForm:
    """A config, whose step shall have a form that the config leaves open."""

    config: MemoryConfig
    form: Settled


def _with_rivals(variants: Mapping[str, Any], given: tuple[Any, ...], target: Target) -> dict[str, Any]:
    """Variants, each config followed by its other forms that may win on a target."""
    found = {}
    for name, variant in variants.items():
        found[name] = variant
        byte_budget = isinstance(variant, MemoryConfig) and variant.budget is not None and variant.budget.share is None
        if not isinstance(variant, MemoryConfig) or byte_budget or not (given and isinstance(given[0], Workload)):
            continue
        spec = StepSpec.of(given[0], variant)
        first = settled(spec, target).form
        found |= {f"{name}, {form.in_words(first)}": _InForm(variant, form) for form in rivals(spec, target)}
    return found


def target_for(*given: Any, runs: bool = False) -> Target:
    """The target of a comparison that names none: `targets.target_at_hand`, which shows what remat saves.

    What lies on several devices of this machine stays there: "local".

    Args:
      *given: a workload, or the arguments of a loss.
      runs: whether steps shall also be run.
    """
    held = [(each.params, each.batch) if isinstance(each, Workload) else each for each in given]
    mesh = mesh_of(mixed=True, arguments=held)
    if mesh is not None and mesh.size > 1:
        return resolve_target("local")
    return target_at_hand(runs=runs)
