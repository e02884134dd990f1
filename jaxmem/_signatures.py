"""How functions may be called: the names of their arguments, and which keywords a loss declares."""

import inspect
from collections.abc import Callable, Sequence

from jaxmem.errors import WorkloadError

_LEARNED = ("params", "model", "variables", "weights")  # what a first argument of a loss is called


def check_loss(loss_fn: Callable, form: str, keywords: tuple[str, ...] = ("rng", "state", "memory")) -> None:
    """WorkloadError unless a loss can be called as `form` says, with some of `keywords`."""
    if not callable(loss_fn):
        raise WorkloadError(wanted=f"a loss {form}", got=f"a {type(loss_fn).__name__}", do="Pass a function.")
    wanted = f"a loss that can be called as {form}, and may declare {', '.join(keywords)}"
    do = f"Put what has rows into one batch, x, y = batch, and take a key as a keyword: def {form[:-1]}, *, rng)."
    check_call(loss_fn, wanted, 2, lambda: [name for name in keywords if declares(loss_fn, name)], do)
    check_order(loss_fn, form)


def check_order(loss_fn: Callable, form: str) -> None:
    """WorkloadError for a loss whose arguments are named as if it were called the other way round."""
    try:
        first, second, *_ = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):
        return
    if second in _LEARNED and first not in _LEARNED:
        raise WorkloadError(
            wanted=f"a loss {form}, with what is differentiated first",
            got=f"{getattr(loss_fn, '__name__', 'loss')}({first}, {second}, ...)",
            do=f"Change the order: def {getattr(loss_fn, '__name__', 'loss')}({second}, {first}, ...).",
        )


def check_call(
    fn: Callable,
    wanted: str,
    count: int,
    keywords: Callable[[], Sequence[str]] = tuple,
    do: str = "Bind other arguments with functools.partial.",
) -> None:
    """WorkloadError unless a function takes `count` arguments and some keywords; one without a signature passes."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # such as some builtins
        return
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords()))
    except TypeError as error:
        raise WorkloadError(
            wanted=wanted,
            got=f"{getattr(fn, '__name__', type(fn).__name__)}{signature} ({error})",
            do=do,
        ) from error


def call_loss(loss_fn: Callable, params, batch, **keywords):
    """Calls a loss with only those of `keywords` that it declares."""
    return loss_fn(params, batch, **{k: v for k, v in keywords.items() if declares(loss_fn, k)})


def declares(fn: Callable, name: str) -> bool:
    """Whether a loss `fn(params, batch, ...)` takes the keyword `name`, by name or through `**kwargs`.

    Its first two positional parameters are params and batch, whatever they are called: `loss(state, batch)`.
    """
    parameters = inspect.signature(fn).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if name in parameters:
        taken = [p.name for p in parameters.values() if p.kind in positional][:2]
        return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY and name not in taken
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def argument_names(fn: Callable, count: int) -> list[str]:
    """The roots of the paths that JAX gives to positional arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{number}]" for number in range(count - len(names))]


def is_train_state(tree) -> bool:
    """Whether it is a record of parameters and optimizer state, such as flax's `TrainState` and `nnx.Optimizer`."""
    return hasattr(tree, "opt_state") and (hasattr(tree, "params") or hasattr(tree, "tx"))
