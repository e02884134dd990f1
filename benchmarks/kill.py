"""Checkpoints under `kill -9` and under damage: what is complete is never lost, and what is damaged never passes.

    python -m benchmarks.kill --runs 120 --json -

A run is killed at a random moment, by the clock or at a file operation, while it trains (a save every 1 to 3 windows,
which take less time than the saves) or restores, often more than once, and then resumed until its end.
`kills` counts signals, `runs` the runs so ended; `lost` what was complete and cannot be restored, or was to be complete
and is not; `wrong` ends that differ in a bit from the run that was not stopped; `partial` states taken for a good
checkpoint that are none. `pairs` are two processes that save together, of which one is killed. `damages` are done to
each file of three checkpoints, `disks` are cases of full, read-only, foreign or vanishing ones; `unnoticed`,
`disks_wrong` and `pairs_wrong` count those after which anything but the right error, the last good checkpoint and
unchanged files was seen. `alarms` are warnings of damage where there was none, `leftovers` folders in which something
else is left than what was to be kept. A kill keeps what the kernel has in its page cache: power failures are another
matter.
"""

import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import _kill_run as run
from benchmarks._harness import emit
from benchmarks._kill_chain import Known, Outcome, chain, learn, start, unhindered
from benchmarks._kill_disks import cases
from benchmarks._kill_pair import pairs


def one(kind: str, known: Known, folder: Path, seed: int) -> Outcome:
    """`chain` in a folder of its own."""
    folder = folder / f"{kind}-{seed}"
    try:
        return chain(kind, known, folder, seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kills(folder: Path, wanted: int, jobs: int, seed: int) -> tuple[Outcome, int]:
    """Chains of all kinds in turn until so many runs were killed and ended."""
    total, runs = Outcome(), 0
    known = {kind: learn(kind, folder / f"{kind}-known") for kind in run.KINDS}
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fork) as pool:
        while runs < wanted:
            seeds = range(seed, seed := seed + max(wanted - runs, jobs))
            kinds = [run.KINDS[s % len(run.KINDS)] for s in seeds]
            for outcome in pool.map(one, kinds, map(known.get, kinds), [folder] * len(seeds), seeds):
                runs += bool(outcome.kills)
                for name, found in vars(outcome).items():
                    getattr(total, name).extend(found)
                if sys.stderr.isatty():
                    print(f"\r{runs} runs, {len(total.kills)} kills", end="", file=sys.stderr)
    return total, runs


def damage(folder: Path, seed: int) -> list[tuple[str, list[str]]]:
    """(name, what is wrong) of every damage to the files of three checkpoints; sharded ones have the most files."""
    kind, here, stranger = "sharded", str(folder / "damaged"), str(folder / "stranger")
    unhindered(run.three, kind, stranger, 1)
    digests = {int(n): d for n, d in unhindered(run.three, kind, here, 0).value("digests").items()}
    process = start(run.damaged, kind, here, stranger, digests, seed)
    if (ended := process.end(1200)) != "ended":
        raise RuntimeError(f"the run that does damage {ended}: {process.output()}")
    return [event.value for event in process.all("damage")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=max(os.cpu_count() or 1, 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where folders are made; the temporary folder if not given")
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="jaxmem-kill-") as name:
        folder, started = Path(name), time.perf_counter()
        outcome, runs = kills(folder, options.runs, options.jobs, options.seed)
        kill_seconds = time.perf_counter() - started
        paired = pairs(folder / "pairs", options.pairs, options.seed)
        damaged, disks = damage(folder, options.seed), list(cases("adam", folder / "disks"))
        seconds = time.perf_counter() - started
    lists = {
        **vars(outcome),
        "unnoticed": [f"{name}: {wrong}" for name, wrong in damaged if wrong],
        "disks_wrong": [f"{case.kind}: {case.name}: {case.wrong}" for case in disks if case.wrong],
        "pairs_wrong": [f"{name}: {wrong}" for name, wrong in paired if wrong],
    }
    figures = {"runs": runs, "kill_seconds": kill_seconds, "seconds": seconds}
    figures |= {"pairs": len(paired), "damages": len(damaged), "disks": sum(not case.left_out for case in disks)}
    figures |= {name: len(found) for name, found in lists.items()}
    notes: dict[str, object] = {name: found[:20] for name, found in lists.items() if name != "kills" and found}
    notes["disks"] = collections.Counter(f"{case.kind}{', left out' * case.left_out}" for case in disks)
    emit(figures, target="cpu", provenance=dict.fromkeys(figures, "measured"), notes=notes, out=options.json)


if __name__ == "__main__":
    main()
