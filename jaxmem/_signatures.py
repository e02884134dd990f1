"""How the functions of a workload may be called: which keywords a loss declares."""

import inspect
from collections.abc import Callable, Sequence

from jaxmem.errors import WorkloadError


def check_loss(loss_fn: Callable, form: str, keywords: tuple[str, ...] = ("rng", "state", "memory")) -> None:
    """WorkloadError unless a loss can be called as `form` says, with some of `keywords`."""
    if not callable(loss_fn):
        raise WorkloadError(wanted=f"a loss {form}", got=f"a {type(loss_fn).__name__}", do="Pass a function.")
    wanted = f"a loss that can be called as {form}, and may declare {', '.join(keywords)}"
    check_call(loss_fn, wanted, 2, lambda: [name for name in keywords if declares(loss_fn, name)])


def check_call(fn: Callable, wanted: str, count: int, keywords: Callable[[], Sequence[str]] = tuple) -> None:
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
            do="Bind other arguments with functools.partial.",
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
