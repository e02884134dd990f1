"""Where ties lie: on what a block reads, and on what comes after it with matmuls of its own, such as a loss's head."""

import itertools
from collections.abc import Callable, Sequence

from jaxmem._compat import called_programs, checkpoint_policy, prevents_cse
from jaxmem.jaxprs import Facts, evaluate_with, function_of, inputs_of, is_float, is_value, jaxpr_of, scope_of, tie
from jaxmem.remat._mark import MARK
from jaxmem.remat.blocks._names import HEAD, STEM, WHOLE, equation_name
from jaxmem.remat.blocks._plan import Inside, Interval

# A block that reads a part of an array, or casts it, makes a gradient of that, and no barrier should hold a larger one.
_PARTS = frozenset("slice dynamic_slice unstack convert_element_type".split())


def program_of(facts: Facts, indices: Sequence[int], inputs, outputs) -> Callable[..., list]:
    """A function of `inputs` that runs equations; a block that is only marked loses its mark."""
    eqns = [facts.eqns[i] for i in indices]
    if not any(checkpoint_policy(eqn) == MARK for eqn in eqns):
        return function_of(eqns, inputs, outputs)
    program = jaxpr_of(eqns, inputs, outputs)
    return lambda *args: evaluate_with(program, (), args, _unmarked)


def _unmarked(eqn) -> Callable[..., list] | None:
    if checkpoint_policy(eqn) != MARK:
        return None
    ((jaxpr, consts),) = called_programs(eqn)

    def run(*args):
        with scope_of(eqn):
            return evaluate_with(jaxpr, consts, args, _unmarked)

    return run


def tied_program(facts: Facts, indices: Sequence[int], outputs, name: str, untied=frozenset()) -> Callable[..., list]:
    """As `program_of`, of `facts.inputs(indices)`, with a tie on all that the equations read.

    Args:
      name: of the tie.
      untied: variables whose gradients may go on by themselves.
    """
    parts = _parts(facts, indices)
    rest = [i for i in indices if i not in parts]
    read = _in_order_of_use(facts, rest)
    if name == HEAD:
        # The gradient of its input first: behind that of its weights XLA:GPU kept an activation more. A GPT with one
        # array for embedding and output layer, H100, jax 0.10.2: 2.071 → 2.087 GiB; on a v5e both orders are alike.
        read = read[::-1]
    chosen = [v not in untied and not _summed_otherwise(facts, rest, v) for v in read]
    made = {v for i in parts for v in facts.eqns[i].outvars}
    passed = [v for v in outputs if v in made and v not in read]  # only others read these
    read, chosen = [*read, *passed], [*chosen, *(False for _ in passed)]
    run = program_of(facts, rest, read, outputs)
    take = program_of(facts, parts, facts.inputs(indices), read)

    def block(*args):
        values = take(*args)
        tied = iter(tie(list(itertools.compress(values, chosen)), name))
        return run(*[next(tied) if yes else value for yes, value in zip(chosen, values, strict=True)])

    return block


def _in_order_of_use(facts: Facts, indices: Sequence[int]) -> list:
    """What equations read; for a checkpoint alone, in the order in which its program does.

    Gradients are made in the opposite order, which is that of the barrier; see `jaxprs/_tie.py` for what it is worth.
    """
    read = facts.inputs(indices)
    if len(indices) != 1 or not _is_checkpoint(facts, indices[0]):
        return read
    eqn = facts.eqns[indices[0]]
    ((jaxpr, _),) = called_programs(eqn)
    use = {v: i for i, v in enumerate(inputs_of(jaxpr.eqns))}
    first = {}
    for outer, inner in zip(eqn.invars, jaxpr.invars, strict=True):
        if is_value(outer):
            first[outer] = min(use.get(inner, len(use)), first.get(outer, len(use)))
    return sorted(read, key=first.__getitem__)


def _parts(facts: Facts, indices: Sequence[int]) -> list[int]:
    """The equations that take parts of arguments of the loss, such as one layer's weights, and what those read."""
    chosen: set[int] = set()
    for i in reversed(indices):
        eqn = facts.eqns[i]
        read = any(reader in chosen for v in eqn.outvars for reader in facts.read_at.get(v, ()))
        if all(v in facts.free for v in eqn.outvars) and (read or eqn.primitive.name in _PARTS):
            chosen.add(i)
    return sorted(chosen)


def _summed_otherwise(facts: Facts, indices: Sequence[int], v) -> bool:
    """Whether a tie would change in which order the terms of a value's gradient are added, and so its last bits.

    They are added from the last reader to the first, and those of an argument to what earlier micro-batches left; a tie
    adds up those of its block before.
    """
    if sum(_reads(facts.eqns[i], v) for i in indices) < 2:
        return False
    own = set(indices)
    argument = v in facts.free and v not in facts.made_at
    return argument or v in facts.returned or any(r > indices[0] and r not in own for r in facts.read_at[v])


def _reads(eqn, v) -> int:
    """How often an equation reads a value; a mark is looked into."""
    if checkpoint_policy(eqn) != MARK:
        return sum(u is v for u in eqn.invars)
    ((jaxpr, _),) = called_programs(eqn)
    inner = [b for a, b in zip(eqn.invars, jaxpr.invars, strict=True) if a is v]
    return sum(_reads(each, u) for u in inner for each in jaxpr.eqns)


def stretches(facts: Facts, start: int, stop: int) -> list[list[int]]:
    """The equations `[start, stop)`, each checkpoint of the user's own by itself."""
    alone = lambda i: i if _is_checkpoint(facts, i) else -1  # noqa: E731
    return [list(group) for _, group in itertools.groupby(range(start, stop), alone)]


def scans_layers(facts: Facts, item: Interval | Inside | None) -> bool:
    """Whether an item of a plan runs layers in a scan."""
    if not isinstance(item, Inside):
        return False
    inner = (scans_layers(plan.facts, each) for plan in item.plans if plan is not None for each in plan.items)
    return facts.eqns[item.start].primitive.name == "scan" or any(inner)


def _shares_weights(facts: Facts, indices: Sequence[int]) -> bool:
    """Whether equations read an argument of the loss, or its cast, that is read before them, too: an embedding."""
    read = (v for v in facts.inputs(indices) if v in facts.free and is_float(v.aval))
    return any(reader < indices[0] for v in read for reader in facts.read_at[v])


def tie_of_block(facts: Facts, indices: Sequence[int], name: str, order: str, before: str | None) -> str | None:
    """The name of the tie at a block; None where there is none, as where no layer comes before it.

    The order "head" ties a head after a scan, and one that shares its weights. There XLA makes the head's weight
    gradients at the end of the backward pass: with full remat on an H100 five of six models had 9 to 10 % more peak. Of
    a head with weights of its own after unrolled layers it finds the place: a tie left two models as they were, and
    gave a third 11 % more.

    Args:
      facts, indices: the equations of the block.
      name: of the block.
      order: of the backward pass.
      before: the layers that come before it, "unrolled" or in a "scan"; None where there are none.
    """
    if order == "free" or name in (STEM, WHOLE):
        return None
    pays = name == HEAD and (before == "scan" or _shares_weights(facts, indices))
    return name if order == "tied" or pays else None


def tie_of_stretch(facts: Facts, stretch: list[int], order: str, before: str | None, *, last: bool) -> str | None:
    """The name of the tie at equations outside of the blocks that were found; None where there is none.

    Args:
      facts, stretch: one of `stretches`.
      order, before: as of `tie_of_block`.
      last: whether none comes after it.
    """
    if order == "free":
        return None
    if _is_checkpoint(facts, stretch[0]):
        return tie_of_block(facts, stretch, equation_name("checkpoint", stretch[0]), order, before)
    if before is None or not any(facts.heavy[i] for i in stretch):
        return None
    return tie_of_block(facts, stretch, HEAD if last else equation_name("equation", stretch[0]), order, before)


def ends_together(eqn, item: Inside) -> bool:
    """Whether each step of a scan is one block by itself: all of its gradients are made when the step ends.

    Ties there cost a v5e up to 1 % of a step's time and save nothing. In an unrolled scan several steps are one.
    """
    blocks = [] if item.plans[0] is None else item.plans[0].items
    alone = len(blocks) == 1 and isinstance(blocks[0], Interval) and len(blocks[0].parts) == 1
    return alone and eqn.params.get("unroll", 1) == 1


def _is_checkpoint(facts: Facts, index: int) -> bool:
    return prevents_cse(facts.eqns[index]) is not None
