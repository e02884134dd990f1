"""The user's own line in a Python traceback."""

import re
from collections.abc import Sequence

from jaxmem._source import is_library

# Python's own, and IPython's 'File ~/net.py:90, in f(x)' and 'Cell In[3], line 12, in f(x)'.
_FRAME = re.compile(
    r'File "([^"]{1,1000})", line (\d{1,9})(?:, in (\S{1,200}))?'
    r"|(?:File |^)([~/\w.<][^\s:,]{0,500}\.py):(\d{1,9}),? in (\w{1,200})"
    r"|(Cell In ?\[\d{1,6}\]), line (\d{1,9})(?:, in (\w{1,200}))?"
)
_START = "Traceback (most recent call last)"


def innermost_user_frame(before: Sequence[str], after: Sequence[str]) -> str:
    """`train.py:12 in step` of the traceback that ends in the error; empty where there is none.

    The traceback before the error counts first: Python writes it above the message. One that follows
    (the message came from a log line of the runtime) is the fallback.

    >>> innermost_user_frame(["Traceback (most recent call last):", '  File "/home/me/train.py", line 12, in step'], [])
    'train.py:12 in step'
    """
    start = max((i for i, line in enumerate(before) if _START in line), default=0)
    follows = next((i for i, line in enumerate(after) if _START in line), len(after))
    return _last(before[start:]) or _last(after[follows : follows + 1000])


def _last(lines: Sequence[str]) -> str:
    for line in reversed(lines):
        if found := _FRAME.search(line):
            path, number, function = next(found.group(i, i + 1, i + 2) for i in (1, 4, 7) if found[i])
            if not is_library(path):
                name = path.replace("\\", "/").rpartition("/")[2]
                return f"{name}:{number}" + (f" in {function}" if function else "")
    return ""
