"""Where a value of a traced program comes from: its operation, name, module and source line."""

import dataclasses
import functools
import re

from jaxmem._compat import called_jaxprs, checkpoint_name_of, name_stack, scan_layout
from jaxmem._source import is_library, is_own, source_line
from jaxmem.jaxprs._equations import TIE, WATCH, is_value

# Operations that hand a value on: what made it is further up.
_TRANSPARENT = frozenset({"device_put", "copy", "copy_p", "reduce_precision", "optimization_barrier", WATCH, TIE})
# What transformations put round a scope; the rest of a name stack are modules and named scopes.
_TRANSFORMS = re.compile(r"\b(?:jvp|transpose|vmap|pmap|linearize|jit|shard_map|checkpoint|rematted_computation)\(")
_CALLS = re.compile(r"([^/]+)\.call(?:/\1(?=/|$))?")
_SCOPES = frozenset({"checkpoint", "rematted_computation", "while", "body", "cond", "closed_call"})


@dataclasses.dataclass(frozen=True)
class Origin:
    """See `Residual`, whose fields these are."""

    name: str | None
    op: str
    module: str
    source: str
    count: int


def origin(jaxpr, var) -> Origin:
    """The origin of a variable of a jaxpr, looked for in the programs that its equations call, too."""
    found = _follow(jaxpr, var, None, (), "", 1)
    return dataclasses.replace(found, module=_plain(found.module))


def _follow(jaxpr, var, name, outer, module, count) -> Origin:
    """`outer`: the (jaxpr, equation) pairs that led here, innermost last; `module` and `count`: of these together."""
    last = None
    while var in (made := _producers(jaxpr)):
        eqn, index = made[var]
        last = eqn
        given = checkpoint_name_of(eqn)
        if given is not None or eqn.primitive.name in _TRANSPARENT:
            name = name or given
            var = eqn.invars[min(index, len(eqn.invars) - 1)]
            if not is_value(var):
                return _at(eqn, name, "constant", module, count, outer)
            continue
        inner = _called(eqn, index)
        if inner is None:
            return _at(eqn, name, eqn.primitive.name, module, count, outer)
        path = _join(module, _module(eqn))
        stacked = eqn.primitive.name == "scan" and index >= scan_layout(eqn)[1]
        times = eqn.params["length"] if stacked else 1
        return _follow(inner, inner.outvars[index], name, (*outer, (jaxpr, eqn, module, count)), path, count * times)
    if outer and var in jaxpr.invars:
        above, eqn, module_above, _ = outer[-1]
        index = jaxpr.invars.index(var)
        if eqn.primitive.name == "scan" and index in _carries(eqn):
            return _carry(jaxpr, eqn, index, name, module, count, outer[:-1])
        # cond has its predicate in front of what the branches are given
        value = eqn.invars[index + len(eqn.invars) - len(jaxpr.invars)]
        if is_value(value):
            return _follow(above, value, name, outer[:-1], module_above, count)
    what = "argument" if var in jaxpr.invars else "constant"
    return _at(last, name, what, module, count, outer) if last is not None else Origin(name, what, module, "", count)


def _carry(jaxpr, eqn, index, name, module, count, outer) -> Origin:
    """The input of a scan's body: what made the output that becomes the next iteration's input."""
    output = jaxpr.outvars[_carries(eqn).index(index)]
    if output in _producers(jaxpr) and output is not jaxpr.invars[index]:
        made = _follow(jaxpr, output, None, (), module, count)  # within the body only: no way out
        file = made.source.rpartition(":")[0]
        source = made.source if file and not is_library(file) else _line(eqn, outer)
        return dataclasses.replace(made, name=name, op=f"carry ({made.op})", source=source)
    return _at(eqn, name, "carry", "", count, outer)


def _carries(eqn) -> range:
    """Which inputs of a scan's body are its carry."""
    consts, carried, _ = scan_layout(eqn)
    return range(consts, consts + carried)


def _called(eqn, index: int):
    """The program in which output `index` of an equation is made, if it calls one that has as many outputs."""
    if eqn.primitive.name == "while":
        return None
    for inner in called_jaxprs(eqn):
        if len(inner.outvars) == len(eqn.outvars) and is_value(inner.outvars[index]):
            return inner
    return None


def _at(eqn, name, op: str, module: str, count: int, outer) -> Origin:
    """An equation as the origin."""
    return Origin(name, op, _join(module, _module(eqn)), _line(eqn, outer), count)


def _line(eqn, outer) -> str:
    """The source line of an equation, or of the calls round it: JAX traces a loop's body, for example, by itself.

    What jaxmem made itself, such as a stack of weights, has none.
    """
    line = source_line(eqn, *(above for _, above, *_ in reversed(outer)))
    return "" if is_own(line) else line


def _producers(jaxpr) -> dict:
    found = _PRODUCERS.get(id(jaxpr))
    if found is None or found[0] is not jaxpr:
        made = {var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)}
        found = (jaxpr, made)
        if len(_PRODUCERS) > 256:
            _PRODUCERS.clear()
        _PRODUCERS[id(jaxpr)] = found
    return found[1]


_PRODUCERS: dict[int, tuple] = {}


@functools.lru_cache(maxsize=4096)
def _split(stack: str) -> tuple[str, ...]:
    plain = _TRANSFORMS.sub("", stack).replace(")", "") if "(" in stack else stack
    return tuple(part for part in plain.split("/") if part)


def scopes_of(eqn) -> tuple[str, ...]:
    """The modules and named scopes of an equation, outermost first, without what transformations put round them."""
    return _split(name_stack(eqn))


def _module(eqn) -> str:
    return "/".join(part for part in scopes_of(eqn) if part not in _SCOPES)


def _join(outer: str, inner: str) -> str:
    """Two paths end to end; an inner program may repeat the path it was called on."""
    if not outer or inner == outer or inner.startswith(f"{outer}/"):
        return inner
    return f"{outer}/{inner}" if inner else outer


def _plain(path: str) -> str:
    """The path without the scope that linen opens for a checkpointed call, in which the module's own comes again."""
    return _CALLS.sub(r"\1", path)
