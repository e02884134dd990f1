"""What to write against bytes that need not be: the words of findings and of `explain_oom`, in one place."""

import dataclasses
import math
import re
from collections.abc import Sequence

from jaxmem.analysis._asked import FILE, Asked, Cure, asked_of
from jaxmem.analysis._donation import Undonated
from jaxmem.analysis._records import Finding
from jaxmem.targets import resolve_target

IN_SLICES = (
    "Wrap the head and the loss of one slice of the sequence in jax.checkpoint and jax.lax.scan over 8 slices, so that "
    "only one slice of the logits exists at a time."
)
WHOLE_TILES = (
    "Make the two minor dimensions multiples of the tile (128 lanes; 8 rows of 32 bits, 16 of 16 bits), or move a "
    "large axis last."
)
_RANDOM = ("threefry", "random_bits", "_bernoulli", "_uniform", "random_wrap", "rng_bit_generator")
_MOST_STEPS = 64
MOST_SHARE = 0.95
"""The largest share of a GPU that JAX's pool can be given."""
VOCABULARY = 16_384
"""A last dimension this large, in float32, is most likely one of logits."""


def in_shell(findings: Sequence[Finding], file: str, options: Sequence[tuple[str, str]]) -> tuple[Finding, ...]:
    """Findings whose cures are commands for a user's file.

    Args:
      findings: of its report.
      file: the FILE[:FUNCTION] that was analysed.
      options: (option, value) of what else was given, such as ("--set", "batch=8"); a command may set one anew.

    >>> shell = "Compile `jaxmem analyze FILE --target gpu-t4 --precision float16`."
    >>> finding = Finding(kind="float32", size_bytes=1, title="", cure="", shell=shell)
    >>> in_shell([finding], "gpt.py", [("--precision", "float32"), ("--set", "n=8")])[0].cure
    'Compile `jaxmem analyze gpt.py --set n=8 --target gpu-t4 --precision float16`.'
    """

    def filled(found: re.Match) -> str:
        before, after = found.groups()
        more = [f"{option} {value}" for option, value in options if f"{option} " not in after]
        return f"`{before}{' '.join([file, *more])}{after}`"

    pattern = re.compile(rf"`([^`]*)\b{FILE}\b([^`]*)`")
    return tuple(
        dataclasses.replace(finding, cure=pattern.sub(filled, finding.shell), shell="") if finding.shell else finding
        for finding in findings
    )


def is_random(op_name: str) -> bool:
    """Whether an operation draws random bits."""
    return any(name in op_name for name in _RANDOM)


def recompute(asked: Asked, kept_bytes: int) -> Cure:
    """Against values that wait for the backward pass: rematerialisation, a budget, smaller micro-batches.

    Args:
      asked: what is analysed.
      kept_bytes: of these values.
    """
    budget = sensible_budget(asked, kept_bytes)
    smaller = micro_batches(asked, kept_bytes)
    if asked.config is None:
        return Cure(
            'Rematerialise: differentiate jaxmem.remat.apply(loss, "full") instead of the loss, or '
            f'jaxmem.remat.auto(loss, "{format_budget(kept_bytes // 2)}"), which chooses what to keep within that '
            "many bytes."
        )
    if asked.config.recomputes:
        lower = f'MemoryConfig(remat="auto:{budget}") keeps fewer. ' if budget and asked.config.budget else ""
        python = f"{lower}{smaller.python}".strip() or "Fewer rows of the batch at once shrink them."
        return Cure(python, smaller.shell, smaller.configs)
    settings = ["none", "full", "dots", *([f"auto:{budget}"] if budget else [])]
    options = ", ".join(f'"{name}"' for name in settings[1:])
    python = f"Rematerialise: MemoryConfig(remat=...) with {options}; jaxmem.compare shows bytes and time of each."
    shell = f"Rematerialise: {asked.command('compare', remat=','.join(settings))} shows bytes and time of each."
    only = "" if budget or not asked.missing_bytes else " That alone cannot make it fit."
    return Cure(
        f"{python}{only} {smaller.python}".rstrip(),
        f"{shell}{only} {smaller.shell}".rstrip(),
        (*(config for name in settings[1:] for config in asked.configs(remat=name)), *smaller.configs),
    )


def sensible_budget(asked: Asked, kept_bytes: int) -> str | None:
    """A bound of the peak that rematerialisation may meet and that changes something; None where there is none.

    It is what fits the device, where the peak does not, and else what half of the kept values leave.

    >>> from jaxmem.targets import resolve_target
    >>> v5e = resolve_target("tpu-v5e")
    >>> full = asked_of(v5e, peak_bytes=20 * 2**30, capacity_bytes=v5e.memory_bytes)
    >>> [sensible_budget(full, kept * 2**30) for kept in (18, 4)]
    ['14.9GiB', None]
    >>> sensible_budget(dataclasses.replace(full, peak_bytes=10 * 2**30), 6 * 2**30)
    '7.0GiB'
    """
    if asked.peak_bytes is None:
        return None
    least, bound = asked.peak_bytes - kept_bytes, asked.peak_bytes - kept_bytes // 2
    if asked.missing_bytes:
        bound = asked.peak_bytes - asked.missing_bytes
    return format_budget(bound) if least < 0.95 * bound else None


def format_budget(size: int) -> str:
    """Bytes as a budget is written, rounded down to two or three digits.

    >>> format_budget(int(7.26 * 2**30)), format_budget(300 * 2**20), format_budget(5000)
    ('7.2GiB', '300MiB', '4KiB')
    """
    if size >= 2**30:
        return f"{math.floor(size / 2**30 * 10) / 10:.1f}GiB"
    return f"{size // 2**20}MiB" if size >= 2**20 else f"{max(1, size // 2**10)}KiB"


def micro_batches(asked: Asked, grows_bytes: int) -> Cure:
    """Smaller micro-batches: as many more as make it fit, at least twice; empty where there are no rows for them.

    Args:
      asked: what is analysed.
      grows_bytes: bytes at the peak that grow with the rows of a micro-batch.
    """
    if asked.config is None:
        return Cure("")
    now = asked.config.accumulation_steps
    steps = fitting_steps(asked.missing_bytes, grows_bytes, asked.rows, now)
    if steps is None:
        return Cure("")
    return Cure(
        f"MemoryConfig(accumulation_steps={steps}) shrinks them, too.",
        f"`--accumulation-steps {steps}` shrinks them, too.",
        asked.configs(accumulation_steps=steps),
    )


def fitting_steps(missing_bytes: int, grows_bytes: int, rows: int | None, now: int = 1) -> int | None:
    """The least number of micro-batches that saves what is missing, a multiple of what there are now.

    Args:
      missing_bytes: to be saved.
      grows_bytes: those that shrink with a micro-batch.
      rows: of all micro-batches on a device; None where they are not known.
      now: number of micro-batches now.

    >>> fitting_steps(0, 8, 12), fitting_steps(6, 8, 12), fitting_steps(6, 8, None), fitting_steps(9, 8, 1)
    (2, 4, 4, None)
    """
    most = min(rows // now if rows else _MOST_STEPS, _MOST_STEPS)
    needed = _MOST_STEPS if grows_bytes <= missing_bytes else max(grows_bytes / (grows_bytes - missing_bytes), 2)
    whole = (rows or 0) // now
    choices = [k for k in range(2, most + 1) if (whole % k == 0 if rows else k.bit_count() == 1)]
    found = next((k for k in choices if k >= needed), choices[-1] if choices else None)
    return None if found is None else found * now


def narrow_dtype(asked: Asked) -> str:
    """The 16-bit dtype that a target has units for: bfloat16, or float16 on a GPU older than sm_80."""
    chip = asked.target.chip if asked.target else None
    return "float16" if chip is not None and not chip.native_bfloat16 else "bfloat16"


def compute_narrow(asked: Asked) -> Cure:
    """Against wide floats: 16 bits, in the dtype that the chip has units for."""
    dtype = narrow_dtype(asked)
    scaled = ", with a loss scale" if dtype == "float16" else ""
    known = asked.target is not None and asked.target.chip is not None
    older = " (float16 on a GPU older than sm_80)" if asked.platform == "gpu" and not known else ""
    command, configs = asked.command("analyze", precision=dtype), asked.configs(precision=dtype)
    if asked.config is None:
        return Cure(f"Compute in {dtype}{older}: cast parameters and batch where the loss begins{scaled}.")
    if asked.may_undo_recomputation:
        why = (
            "with random bits in 16-bit layers a TPU's compiler can undo their recomputation, unless the masks are "
            "fenced. Compile before you choose:"
        )
        return Cure(
            f'16 bits may cost bytes here: {why} MemoryConfig(precision="{dtype}", random="fenced").',
            f"16 bits may cost bytes here: {why} {asked.command('analyze', precision=dtype, random='fenced')}.",
            asked.configs(precision=dtype, random="fenced"),
        )
    python = f'Compute in 16 bits: MemoryConfig(precision="{dtype}") keeps float32 parameters beside it{scaled}{older}.'
    shell = f"Compute in 16 bits: {command} says what it comes to; parameters stay float32{scaled}{older}."
    return Cure(python, shell, configs)


def compile_elsewhere() -> Cure:
    """Against what only this machine's compiler does: another target."""
    elsewhere = asked_of(resolve_target("gpu-h100"))
    return Cure(
        'Compile for the chip that will run it: target="tpu-v5e" or "gpu-h100".',
        f"Compile for the chip that will run it, such as {elsewhere.command('analyze')}.",
    )


def larger_share(asked: Asked) -> Cure:
    """Against a share of the GPU that is too small."""
    more = f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_SHARE}"
    python = f"Set {more} before JAX starts. See with nvidia-smi that no other process holds memory."
    return Cure(python, f"{python} {asked.command('analyze').replace('jaxmem', f'{more} jaxmem', 1)} counts with it.")


_FENCE = "jax.lax.optimization_barrier round each mask"


def draw_apart(asked: Asked) -> Cure | None:
    """Against random bits: fences round masks, with the same numbers; a generator that draws fast, with others.

    None where both are there already. On GPUs fences were never seen to save bytes.
    """
    fence, generator = not asked.fenced and asked.platform != "gpu", not asked.by_hardware
    if not fence and not generator:
        return None
    if asked.config is None:
        unproven = " Not compiled: what it saves, the target's compiler tells."
        ways = [f"{_FENCE}, or jaxmem.random_bits.fenced round the loss, with the same numbers"] if fence else []
        ways += ["jax.config.update('jax_default_prng_impl', 'rbg'), with other numbers"] if generator else []
        return Cure(f"Draw random bits apart from what reads them: {'; or '.join(ways)}.{unproven}")
    ways = [({"random": "fenced"}, "the same numbers")] if fence else []
    ways += [({"generator": "rbg"}, "other numbers, by the hardware's generator")] if generator else []
    python, shell, configs = [], [], []
    for setting, numbers in ways:
        ((field, value),) = setting.items()
        python.append(f'MemoryConfig({field}="{value}"), {numbers}')
        shell.append(f"{asked.command('analyze', **setting)}, {numbers}")
        configs += asked.configs(**setting)
    return Cure(
        f"Draw random bits apart from what reads them: {'; or '.join(python)}.",
        f"Draw random bits apart from what reads them: {'; or '.join(shell)}.",
        tuple(configs),
    )


def donate(asked: Asked, kept: Sequence[Undonated]) -> Cure:
    """Against state that is not donated: the line with the user's own names."""
    named = " and ".join(f"`{each.argument}`" for each in kept)
    if not all(each.whole for each in kept):
        return Cure(f"Pass the state as an argument of its own, apart from what else is in {named}, and donate it.")
    donated = sorted({*asked.donated, *((each.number, each.argument) for each in kept)})
    names, ends = [name for _, name in donated], "," if len(donated) == 1 else ""
    places = [_place(name, asked.parameters) for name in names]
    if asked.parameters and None not in places:
        option = f"donate_argnums=({', '.join(map(str, places))}{ends})"
    elif all(name.isidentifier() for name in names):
        option = f"donate_argnames=({', '.join(map(repr, names))}{ends})"
    else:
        option = f"donate_argnums=({', '.join(str(number) for number, _ in donated)}{ends})"
    after = f"what is passed as {named} cannot be used again after the call"
    if asked.jit == "nnx.jit":
        holds = "holds" if len(kept) == 1 else "hold"
        after = f"{named} {holds} the new arrays after the call, and whoever else holds the old ones cannot use them"
    function = asked.function if asked.function.isidentifier() else "step"  # a lambda has no name to write
    return Cure(f"{asked.jit}({function}, {option}): the new state takes the place of the old; {after}.")


def _place(name: str, parameters: Sequence[str]) -> int | None:
    """Position of an argument, `state` or `args[1]`, in a call."""
    root, _, number = name.rstrip("]").partition("[")
    if root not in parameters or (number and not number.isdigit()):
        return None
    return list(parameters).index(root) + int(number or 0)
