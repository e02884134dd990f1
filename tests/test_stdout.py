"""What libraries print stays out of standard output, whoever else prints at the time."""

import subprocess
import sys


def test_a_librarys_own_lines_go_to_stderr():
    program = """
import ctypes, os
from concurrent.futures import ThreadPoolExecutor
from jaxmem._stdout import stdout_to_stderr
libc = ctypes.CDLL(None)
libc.printf(b"before\\n")
def quietly(number):
    with stdout_to_stderr():
        libc.printf(b"held back %d\\n", number)
        os.write(1, b"written\\n")
with ThreadPoolExecutor(4) as pool:
    list(pool.map(quietly, range(20)))
print("after")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "after"]
    assert sorted(done.stderr.splitlines()) == sorted([f"held back {i}" for i in range(20)] + ["written"] * 20)


def test_a_closed_stdout_is_no_fault():
    program = "import os; os.close(1)\nfrom jaxmem._stdout import stdout_to_stderr\nwith stdout_to_stderr(): pass"
    subprocess.run([sys.executable, "-c", program], check=True)
