"""Cut, garbled, coloured, interleaved and huge texts: an explanation or an InputError, soon."""

import contextlib
import io
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.analysis.oom import explain_oom
from jaxmem.analysis.oom._events import FORMS, MOST_REPORTS
from jaxmem.errors import InputError

pytestmark = pytest.mark.once

TEXTS = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parent / "goldens").glob("*.txt"))}
SIZE = 8 * 2**20
LIMIT_SECONDS = 20 * SIZE / 200e6  # of CPU: 200 MB in 20 s; a log of any sort takes a few
FIXED_SECONDS = 0.5  # a whole explanation of the megabyte after the first report


def explained_or_refused(data):
    start = time.process_time()
    with contextlib.suppress(InputError):
        said = explain_oom(data)
        assert json.loads(said.to_json())["line"] <= data.count(b"\n") + 1
        sizes = [said.requested_bytes, said.used_bytes, said.limit_bytes, said.free_bytes, said.missing_bytes]
        sizes += [size for b in said.buffers for size in (b.size_bytes, b.size_bytes - b.padding_bytes)]
        sizes += [fact.size_bytes for fact in said.facts] + [advice.saves_bytes for advice in said.advice]
        assert all(0 <= size < 2**63 for size in sizes if size is not None)
        assert said.advice and all(advice.because and "- wanted" not in advice.because for advice in said.advice)
    assert time.process_time() - start < 2


@given(st.sampled_from(sorted(TEXTS)), st.sampled_from(sorted(TEXTS)), st.randoms())
@settings(max_examples=100, deadline=None)
def test_interleaved_lines_of_two_processes_raise_nothing_else(one, two, random):
    lines = [TEXTS[one].split(b"\n"), TEXTS[two].split(b"\n")]
    mixed = []
    while lines[0] or lines[1]:
        process = random.choice([i for i in (0, 1) if lines[i]])
        mixed.append(random.choice([b"", b"(w pid=%d) " % process]) + lines[process].pop(0))
    explained_or_refused(b"\r\n".join(mixed))


@given(st.sampled_from(sorted(TEXTS)), st.data())
@settings(max_examples=300, deadline=None)
def test_cut_and_garbled_texts_raise_nothing_else(name, data):
    text = TEXTS[name]
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    garbled = bytearray(text[begin:end])
    for _ in range(data.draw(st.integers(0, 8))):
        if garbled:
            at = data.draw(st.integers(0, len(garbled) - 1))
            garbled[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=8))
    explained_or_refused(bytes(garbled))


@pytest.mark.parametrize("name", TEXTS)
def test_colours_crlf_and_prefixes_change_nothing(name):
    plain = explain_oom(TEXTS[name])
    lines = TEXTS[name].decode().split("\n")
    changed = "\r\n".join(f"\x1b[31m{line}\x1b[0m" for line in lines)
    ranked = "\n".join(f"[rank3]: {line}" for line in lines)
    for text in (changed, ranked) if name not in ("killed",) else (changed,):
        said = explain_oom(text)
        assert (said.requested_bytes, said.used_bytes, said.limit_bytes, len(said.buffers)) == (
            plain.requested_bytes,
            plain.used_bytes,
            plain.limit_bytes,
            len(plain.buffers),
        )


def test_a_json_log_and_utf_16():
    text = TEXTS["tpu_report"].decode()
    assert len(explain_oom(json.dumps({"message": text})).buffers) == 4
    assert len(explain_oom(text.encode("utf-16")).buffers) == 4


WORDS = b" ".join(form.words.encode() for form in FORMS)
UNITS = {
    "one line": b"x",
    "an ordinary log": b"step 12 loss 2.345 tokens per second 123456 and so on and so on\n",
    "near matches": b"Ran out of memory in memory space \n",
    "longer near matches": b"2026-11-30 00:18:43 W Attempting to allocate nothing at all, really..\n",
    "the shortest near matches": b"x Killed\n",
    "exit codes": b"exited with code 1 or 137 \n",
    "several triggers a line": b"MemoryError NCCL scratch Killed 137 Attempting to allocate CUDA_ERROR_OUT_OF_MEMOR\n",
    "every trigger a line": WORDS + b"\n",
    "every trigger in one line": WORDS + b" ",
    "reports without end": b"CUDA_ERROR_OUT_OF_MEMORY\n",
    "reports in one line": b"Ran out of memory in memory space hbm. Used 1.00G of ",
    "halves of colours": b"\x1b[",
    "colours": b"\x1b[31mx\x1b[0m\r\n",
    "buffers": b"  1. Size: 1.00G\n",
    "open quotes": b'op_name="',
    "allocators": b"Allocator (GPU_0_bfc ran out of memory trying",
    "scratch": b"ailed to allocate scratc and scratch ",
    "marks of UTF-16": b"\xff\xfe\n",
    "empty lines": b"\n",
}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_time_is_linear(unit):
    data = unit * (SIZE // len(unit))
    for text in (data, TEXTS["tpu_report"] + data):
        start = time.process_time()
        try:
            explain_oom(io.BytesIO(text))
        except InputError:
            assert text is data
        assert time.process_time() - start < LIMIT_SECONDS + FIXED_SECONDS


def test_a_log_of_nothing_else_is_counted_up_to_a_limit_and_near_its_end():
    stream = io.BytesIO(b"CUDA_ERROR_OUT_OF_MEMORY\n" * (SIZE // 25))
    assert MOST_REPORTS < explain_oom(stream).repeats < 5 * MOST_REPORTS


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind}: {form.words}")
def test_patterns_begin_with_fixed_words(form):
    """Otherwise each position of a text is a candidate, and a log of 200 MB takes minutes."""
    assert len(form.words) >= 3
