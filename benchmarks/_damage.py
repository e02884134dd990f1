"""Every kind of damage to a checkpoint's files, and whether it is noticed. Files only: no JAX."""

import hashlib
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST = "checkpoint.json"
Damage = Callable[[Path], object]  # takes the folder of one checkpoint


def damages(path: Path, *, other: Path, stranger: Path, seed: int = 0, flips: int = 3) -> Iterator[tuple[str, Damage]]:
    """(name, what does it) for every file of a checkpoint, and for its manifest as a whole.

    Args:
      path: of the checkpoint.
      other: one of the same run.
      stranger: one of another run of the same model, with the same number.
      seed: of the bits that are flipped.
      flips: bits in each file: of the first byte, of the last, and of others; ten times as many in the manifest.
    """
    draw = random.Random(seed)
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        name, size = str(file.relative_to(path)), file.stat().st_size
        count = flips * (10 if name == MANIFEST else 1)
        places = [0, size - 1, *(draw.randrange(size) for _ in range(count - 2))][:count] if size else []
        for place in places:
            bit = draw.randrange(8)
            yield f"{name}: bit {bit} of byte {place} flipped", _in_file(name, lambda b, p=place, i=bit: _flip(b, p, i))
        lengths = {"to nothing": 0, "to half": size // 2, "by a byte": size - 1} if size else {}
        for how, length in lengths.items():
            yield f"{name}: cut {how}", _in_file(name, lambda b, n=length: b[:n])
        yield f"{name}: a byte more", _in_file(name, lambda b: b + b"\0")
        yield f"{name}: removed", lambda p, n=name: (p / n).unlink()
        if size > 1:
            yield f"{name}: nothing but zeros", _in_file(name, lambda b: bytes(len(b)))
    for text in ("", "{}", "null", "[]", '{"format": 1}'):
        yield f"{MANIFEST}: {text!r}", lambda p, t=text: (p / MANIFEST).write_text(t)
    yield f"{MANIFEST}: another step's", lambda p: shutil.copy(other / MANIFEST, p)
    yield f"{MANIFEST}: another run's", lambda p: shutil.copy(stranger / MANIFEST, p)
    yield f"{MANIFEST}: a folder", lambda p: ((p / MANIFEST).unlink(), (p / MANIFEST).mkdir())
    yield "state: another step's", lambda p: _copied(other / "state", p / "state")
    yield "state: another run's", lambda p: _copied(stranger / "state", p / "state")
    yield "state: removed", lambda p: shutil.rmtree(p / "state")
    yield "state: a file", lambda p: (shutil.rmtree(p / "state"), (p / "state").write_text("lost"))
    yield "all of another step", lambda p: _copied(other, p)


def _in_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def _flip(content: bytes, place: int, bit: int) -> bytes:
    """
    >>> _flip(b"abc", 1, 0)
    b'acc'
    """
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def _copied(source: Path, path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(source, path)


def content(folder: Path) -> dict[str, str]:
    """Name → digest of every file below a folder, and of a lock only that it is there."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".jaxmem.lock")
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def complaints(folder: Path, number: int, digest_of: Callable[..., str], digests: dict[int, str]) -> list[str]:
    """What is wrong with how a damaged checkpoint of a folder is met; empty where the damage is noticed.

    The newest good one must be found and restored, a damaged newer one be named in a warning; the damaged one, asked
    for by its number, must be refused by name; and no file must change.

    Args:
      folder: of checkpoints.
      number: of the one that is damaged.
      digest_of: restores a number, None for the newest good one, and gives the digest of the state.
      digests: number → the digest of the state that was saved.
    """
    from jaxmem.checkpoint import latest  # after the fork, which this module does not wait for
    from jaxmem.errors import CheckpointError, CheckpointWarning

    before, found = content(folder), []
    good = max(n for n in digests if n != number)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            newest = latest(folder)
        if newest is None or newest.number != good:
            found.append(f"the newest good one is said to be {newest and newest.number}, and is {good}")
        told = " ".join(str(w.message) for w in said if issubclass(w.category, CheckpointWarning))
        if number > good and str(number) not in told:
            found.append(f"no warning names it: {told!r}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            if digest_of(None) != digests[good]:
                found.append("what is restored is not the newest good one")
    except Exception as error:
        found.append(f"to look for the newest good one raises {type(error).__name__}: {error}")
    try:
        restored = digest_of(number)
        found.append("it is restored " + ("as it was" if restored == digests[number] else "with other numbers"))
    except CheckpointError as error:
        if str(number) not in str(error):
            found.append(f"the error does not name it: {error}")
    except Exception as error:
        found.append(f"to restore it raises {type(error).__name__}: {error}")
    if content(folder) != before:
        found.append("files changed")
    return found
