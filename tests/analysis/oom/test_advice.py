"""Advice that could work: rows there are, memory held elsewhere, pieces that are too small, what a small list shows."""

import pytest

from jaxmem.analysis.oom import explain_oom

pytestmark = pytest.mark.once

K, M, G = 2**10, 2**20, 2**30


def compiled_text(shapes, used=40.0, op="jvp(Net)/block_2/mlp/dot_general"):
    """A report of a TPU's compiler that lists f32 buffers of these shapes."""
    text = (
        f"RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used {used:.2f}G of 16.00G hbm. Exceeded hbm "
        f"capacity by {used - 16:.2f}G.\nProgram hbm requirement {used:.2f}G:\n    HLO temp  {used:.2f}G (99% used)\n"
        "  Largest program allocations in hbm:\n"
    )
    for number, shape in enumerate(shapes, start=1):
        text += (
            f'  {number}. Size: 2.00G\n     Operator: op_name="jit(step)/{op}"\n     Shape: f32[{shape}]{{1,0}}\n'
            "     Allocation type: HLO temp\n     ==========================\n"
        )
    return text


def micro_batches(text):
    titles = [a.title for a in explain_oom(text).advice if "micro-batches" in a.title]
    return [int(title.split()[4]) for title in titles]


@pytest.mark.parametrize(
    "shapes, op, used, wanted",
    [
        (["24,1024,512"], "jvp(Net)/dot_general", 40, 3),  # 40 / 16 at least, and 24 rows
        (["10,1024,512"], "jvp(Net)/dot_general", 100, 10),  # 7 would be enough, but does not divide 10
        (["6,1024,512"], "jvp(Net)/dot_general", 400, 6),  # 25 would be needed: there are six rows
        (["1,1024,512"], "jvp(Net)/dot_general", 40, None),  # one row cannot be cut
        (["12,8,1024,512"], "jvp(Net)/while/body/dot_general", 400, 8),  # twelve layers, stacked by a loop
        (["8,1024,512", "8,99,512", "1048576,512"], "jvp(Net)/dot_general", 400, 8),
        (["1048576"], "jvp(Net)/dot_general", 40, 4),  # rows unknown: a power of two
        (["99999999999999,8"], "jvp(Net)/dot_general", 40, 3),
    ],
)
def test_no_more_micro_batches_than_rows(shapes, op, used, wanted):
    assert micro_batches(compiled_text(shapes, used, op)) == ([] if wanted is None else [wanted])


def test_a_partial_list_is_told_and_a_whole_one_is_not():
    partial = explain_oom(compiled_text(["24,1024,512"]))
    assert "The list is partial: its buffers hold 2.00 GiB of 40.00 GiB." in partial.notes
    assert not any("partial" in note for note in explain_oom(compiled_text(["24,8"] * 12)).notes)


def assignment(requested, arguments, total, limit=None, in_use=None):
    stats = f"Stats: Limit: {limit} InUse: {in_use} MaxInUse: {in_use}\n" if limit else ""
    return (
        f"{stats}XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate {requested} bytes.\n"
        f"BufferAssignment OOM Debugging.\nBufferAssignment stats:\n       parameter allocation:  {arguments}MiB\n"
        f"        maybe_live_out allocation:  {arguments}MiB\n     preallocated temp allocation:         0B\n"
        f"                 total allocation:  {total}MiB\n"
    )


@pytest.mark.parametrize("pool", [(None, None), (8 * G, 8 * G - M)])
def test_a_small_program_did_not_fill_the_memory(pool):
    titles = [a.title for a in explain_oom(assignment(6 * M, 6.0, 12.0, *pool)).advice]
    assert titles[0] == "free what else holds the memory" and not any("donate" in title for title in titles)
    assert not any("activations" in title for title in titles)


def test_a_large_program_is_told_to_donate():
    titles = [a.title for a in explain_oom(assignment(6 * G, 6144.0, 12288.0, 8 * G, 7 * G)).advice]
    assert "donate what the step replaces, or shard it" in titles
    assert "free what else holds the memory" not in titles


def test_a_small_array_on_a_full_tpu():
    said = explain_oom(
        "ValueError: RESOURCE_EXHAUSTED: Attempting to allocate 8.00M. That was not possible. There are 6.00M free.\n"
    )
    assert [a.title for a in said.advice] == ["free what else holds the memory"]
    assert "nvidia-smi" not in said.advice[0].how


@pytest.mark.parametrize(
    "text",
    [
        "Attempting to allocate 300.00M. That was not possible. There are 1.10G free. Due to fragmentation, the "
        "largest contiguous region of free memory is 100.00M.; (0x0x0_HBM0)",
        "Attempting to allocate 300.00M. That was not possible. There are 1.10G free. The largest contiguous "
        "region of free memory is 100.00M due to fragmentation.; (0x0x0_HBM0)",
        "Could not allocate 314572800 bytes in memory 0x0x0_HBM0; 104857600 bytes allocatable, "
        "1181116006 bytes available",
    ],
)
def test_fragmented_tpu_memory(text):
    said = explain_oom(f"RESOURCE_EXHAUSTED: {text}\n")
    assert (said.requested_bytes, said.missing_bytes) == (300 * M, 0)
    assert said.advice[0].title == "the memory is fragmented" and "100.0 MiB" in said.advice[0].because


def test_a_program_that_finds_no_single_piece():
    text = (
        "Attempting to reserve 6.00G at the bottom of memory. That was not possible. There are {} free, 0B reserved, "
    )
    said = explain_oom(text.format("6.50G") + "and 3.25G reservable.\n")
    assert [a.title for a in said.advice] == [
        "the memory is fragmented", "free device arrays before this program is loaded",
    ]  # fmt: skip
    said = explain_oom(text.format("5.00G") + "and 3.25G reservable.\n")
    assert not any("fragmented" in a.title for a in said.advice)


def pool(pieces):
    lines = [
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB (rounded to 2147483648)requested by op "
    ]
    lines += ["I0000 00:00:1773083052.1 7 bfc_allocator.cc:1109] InUse at 7f0000000000 of size 1073741824 next 3"]
    lines += [
        f"I0000 00:00:1773083052.1 7 bfc_allocator.cc:9] Free  at 7f0000000100 of size {p} next 4" for p in pieces
    ]
    lines += ["     Summary of in-use Chunks by size: ", "3 Chunks of size 268435456 totalling 768.00MiB"]
    lines += ["1 Chunks of size 1073741824 totalling 1.00GiB", f"Limit: {12 * G}", f"InUse: {8 * G}"]
    return explain_oom("\n".join(lines))


def test_the_pieces_of_a_pool_show_whether_it_is_fragmented():
    said = pool([G, M, M])
    assert said.advice[0].title == "the pool is fragmented" and "1.00 GiB" in said.advice[0].because
    assert not any("fragmented" in a.title for a in pool([3 * G, G]).advice)


def test_the_chunks_of_a_pool_are_listed_but_are_no_activations():
    said = pool([G])
    assert [(b.size_bytes, b.label) for b in said.buffers] == [
        (G, "1 of 1073741824 bytes"), (768 * M, "3 of 268435456 bytes"),
    ]  # fmt: skip
    assert any("see where the bytes go" in a.title for a in said.advice)


@pytest.mark.parametrize("requested, found", [(2 * G, True), (2 * G + 4 * M, True), (2 * G - 20 * M, False)])
def test_the_request_is_matched_with_the_buffer_of_its_size(requested, found):
    """A text in G is rounded to ten MiB."""
    text = f"XlaRuntimeError: Out of memory while trying to allocate {requested} bytes.\nPeak buffers:\n"
    text += "\tBuffer 1:\n\t\tSize: 3.00GiB\n\t\tEntry Parameter Subshape: f32[9,9]\n\t\t====\n"
    text += '\tBuffer 2:\n\t\tSize: 2.00GiB\n\t\tOperator: op_name="jit(f)/jvp(Net)/head/dot" source_file="/a/net.py" '
    text += "source_line=7\n\t\tXLA Label: fusion\n\t\tShape: f32[8,16,16]\n\t\t====\n"
    said = explain_oom(text)
    assert (said.requested_buffer == said.buffers[1]) is found
    assert said.to_dict()["requested_buffer"] == (said.to_dict()["buffers"][1] if found else None)
    assert any("net.py:7" in note for note in said.notes) is found


@pytest.mark.parametrize(
    "used, because",
    [
        ("Used 30.00M of 16.00M vmem. Exceeded vmem capacity by 14.00M", "30.0 MiB wanted, 16.0 MiB there (line 1)"),
        ("Please file a bug against XLA.", "the text does not say how much (line 1)"),
    ],
)
def test_what_a_kernel_wanted_is_told(used, because):
    said = explain_oom(f"RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. {used}\n")
    assert said.memory == "vmem" and said.advice[0].because == because
