"""The sweep against counting each byte at each position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.analysis.assignment import Span, sweep

pytestmark = pytest.mark.once

KINDS = 3


@st.composite
def spans(draw):
    start = draw(st.integers(0, 12))
    return Span(
        offset=draw(st.integers(0, 20)),
        size=draw(st.integers(0, 8)),
        start=start,
        end=start + draw(st.integers(0, 6)),
        kind=draw(st.integers(0, KINDS - 1)),
    )


def counted(given_spans, position):
    """Bytes by kind at a position, byte by byte; the first kind wins."""
    owner = np.full(64, KINDS)
    for span in given_spans:
        if span.start <= position <= span.end:
            place = slice(span.offset, span.offset + span.size)
            owner[place] = np.minimum(owner[place], span.kind)
    return [int((owner == kind).sum()) for kind in range(KINDS)]


@settings(max_examples=200, deadline=None)
@given(st.lists(spans(), max_size=12))
def test_sweep_counts_each_byte_once(given_spans):
    swept = sweep(given_spans, KINDS)
    rows = dict(zip(swept.positions.tolist(), swept.bytes_by_kind.tolist(), strict=True))
    current = [0] * KINDS
    for position in range(22):
        current = rows.get(position, current)
        assert current == counted(given_spans, position)
    peak = swept.bytes_by_kind[swept.peak].sum()
    assert peak == max(sum(counted(given_spans, p)) for p in range(22))
