"""Why a remat setting frees less than it should: by buffers at the peaks of made-up rows, one cause each."""

import dataclasses

import pytest

from jaxmem.analysis import MemoryReport
from jaxmem.analysis._records import Buffer
from jaxmem.analysis._shortfall import with_shortfall

MIB = 2**20


def row(remat, temps, residuals, *buffers):
    made = tuple(
        Buffer(name=str(i), kind="activations", size_bytes=size * MIB, phase=phase, layer=layer, **more)
        for i, (size, phase, layer, more) in enumerate(buffers)
    )
    fields = {"target": "t", "backend": "gpu", "jax_version": "0", "fits": "yes", "fits_reason": ""}
    sizes = {"peak_bytes": temps * MIB, "temp_bytes": temps * MIB, "saved_residual_bytes": residuals * MIB}
    return MemoryReport(name=remat, remat=remat, buffers=made, **sizes, **fields)  # pyright: ignore[reportArgumentType]


KEPT = [(100, "forward", f"Net/block_{i}/mlp", {}) for i in range(8)]
PLAIN = row("none", 800, 800, *KEPT)


def again(count):
    return [(100, "recompute", f"Net/block_{i}/mlp", {}) for i in range(count)]


def test_values_of_many_layers_computed_again_at_once_are_a_warning():
    found = with_shortfall(row("full", 700, 8, *again(7)), [PLAIN])
    assert found.warnings == (
        "full frees 792.0 MiB of residuals by the model, and 100.0 MiB of temporaries as compiled: at its peak lie "
        "700.0 MiB more of values that are computed again of 7 layers, alive together.",
    )


def test_random_bits_are_a_warning():
    bits = (600, "forward", "Net/block_0", {"shape": "u32[8]", "op_name": "jit(f)/random_bits"})
    (text,) = with_shortfall(row("full", 700, 8, bits, *again(1)), [PLAIN]).warnings
    assert "600.0 MiB more of random bits" in text


@pytest.mark.parametrize(("buffers", "said"), [(again(2), "the working set of a block"), ([], "")])
def test_a_working_set_is_a_note_and_what_nobody_knows_is_nothing(buffers, said):
    found = with_shortfall(row("full", 700, 8, *buffers), [PLAIN])
    assert not found.warnings and len(found.notes) == bool(said) and said in "".join(found.notes)


def test_residuals_that_were_never_stored_are_a_note():
    found = with_shortfall(row("full", 100, 8), [dataclasses.replace(PLAIN, saved_residual_bytes=3000 * MIB)])
    assert not found.warnings and "stores 800.0 MiB of them; others it computes" in found.notes[0]


def test_a_saving_that_is_borne_out_needs_no_words():
    full = row("full", 150, 8, *again(1))
    assert with_shortfall(full, [PLAIN]) == full and with_shortfall(PLAIN, [PLAIN]) == PLAIN
    assert with_shortfall(full, []) == full


def test_a_saving_that_is_none_says_what_lies_there():
    (text,) = with_shortfall(row("full", 900, 8, *again(8)), [PLAIN]).warnings
    assert text.startswith("The saving is not borne out: full keeps") and text.endswith("of 8 layers, alive together.")
