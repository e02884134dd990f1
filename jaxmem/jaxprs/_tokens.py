"""`Tokens`: numbers for equations, equal where two equations do the same."""

import jax.extend.core as jex
import numpy as np

from jaxmem._compat import effect_names
from jaxmem.jaxprs._equations import BODIES, body_of
from jaxmem.jaxprs._facts import Facts

# Parameters that differ from layer to layer where the layers are the same: `w[0]`, `w[1]`, …
_PLACE = frozenset({"start_indices", "limit_indices", "name"})


class Tokens:
    """Numbers for equations: equal where primitive, parameters, shapes and dtypes are.

    Args:
      loose: compare primitives and ranks only, as for layers whose widths differ.
    """

    def __init__(self, facts: Facts, *, loose: bool = False):
        self._ids, self._bodies, self._loose = {}, {}, loose
        self.ids = np.array([self._number(self._token(eqn)) for eqn in facts.eqns], np.int64)

    def _number(self, token) -> int:
        return self._ids.setdefault(token, len(self._ids))

    def _token(self, eqn):
        if self._loose:
            ranks = tuple(len(getattr(v.aval, "shape", ())) for v in eqn.outvars)
            return eqn.primitive.name, ranks
        avals = tuple(self._aval(v) for v in (*eqn.invars, *eqn.outvars))
        if effect_names(eqn) and eqn.primitive.name not in BODIES:  # a print may name its layer
            return eqn.primitive.name, avals
        params = tuple((k, self._value(v)) for k, v in sorted(eqn.params.items()) if k not in _PLACE)
        return eqn.primitive.name, avals, params

    def _aval(self, atom):
        aval = atom.aval
        return getattr(aval, "shape", None), str(getattr(aval, "dtype", ""))

    def _value(self, value):
        if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
            jaxpr, _ = body_of(value)
            if id(jaxpr) not in self._bodies:  # jit gives the same jaxpr to every call of one function
                inner = tuple(self._number(self._token(eqn)) for eqn in jaxpr.eqns)
                self._bodies[id(jaxpr)] = self._number(("jaxpr", inner))
            return self._bodies[id(jaxpr)]
        if isinstance(value, (tuple, list)):
            return tuple(self._value(v) for v in value)
        if value is None or isinstance(value, (bool, int, float, str, np.dtype)):
            return value
        if callable(value) or hasattr(value, "__name__"):  # rules of custom derivatives: a new object for every call
            return getattr(value, "__name__", type(value).__name__)
        try:
            return type(value).__name__, hash(value)
        except TypeError:
            return type(value).__name__
