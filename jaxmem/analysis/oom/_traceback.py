"""The user's own line in a Python traceback."""

import re

_FRAME = re.compile(r'File "([^"]{1,1000})", line (\d{1,9})(?:, in (\S{1,200}))?')
_NOT_USERS = ("site-packages/", "dist-packages/", "/lib/python3", "/lib/python2", "<frozen", "<string>", "/jaxmem/")


def innermost_user_frame(before: str, after: str) -> str:
    """`train.py:12 in step` of the traceback that ends in the error; empty where there is none.

    The traceback before the error counts first: Python writes it above the message. One that follows
    (the message came from a log line of the runtime) is the fallback.

    >>> innermost_user_frame('Traceback:\\n  File "/home/me/train.py", line 12, in step\\n', "")
    'train.py:12 in step'
    """
    return _last(before.rpartition("Traceback (most recent call last)")[2]) or _last(
        after.partition("Traceback (most recent call last)")[2][:65536]
    )


def _last(text: str) -> str:
    found = ""
    for match in _FRAME.finditer(text):
        path = match[1].replace("\\", "/")
        if not any(part in path for part in _NOT_USERS):
            found = f"{path.rpartition('/')[2]}:{match[2]}" + (f" in {match[3]}" if match[3] else "")
    return found
