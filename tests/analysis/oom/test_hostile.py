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
from jaxmem.errors import InputError

TEXTS = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parent / "goldens").glob("*.txt"))}
SIZE = 4 * 2**20
LIMIT_SECONDS = 4.0  # CPU, for two texts of 4 MiB; quadratic time would take hours


def explained_or_refused(data):
    start = time.process_time()
    with contextlib.suppress(InputError):
        json.loads(explain_oom(data).to_json())
    assert time.process_time() - start < 2


@given(st.sampled_from(sorted(TEXTS)), st.data())
@settings(max_examples=300)
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


@pytest.mark.parametrize(
    "unit",
    [
        b"x",
        b"step 12 loss 2.345 tokens per second 123456 and so on and so on\n",
        b"Ran out of memory in memory space \n",
        b"Ran out of memory in memory space hbm. Used 1.00G of ",
        b"MemoryError NCCL scratch Killed 137 Attempting to allocate CUDA_ERROR_OUT_OF_MEMOR\n",
        b"\x1b[",
        b"  1. Size: 1.00G\n",
        b'op_name="',
        b"NCCL ",
        b"\xff\xfe\n",
    ],
)
def test_time_is_linear(unit):
    data = unit * (SIZE // len(unit))
    start = time.process_time()
    for text in (data, TEXTS["tpu_report"] + data):
        try:
            explain_oom(io.BytesIO(text))
        except InputError:
            assert text is data
    assert time.process_time() - start < LIMIT_SECONDS
