"""Texts as they reach people: through launchers and loggers, with several reports in one, host and device mixed."""

import json
from pathlib import Path

import pytest

from jaxmem.analysis.oom import NoOomFound, explain_oom
from jaxmem.analysis.oom._events import MOST_REPORTS

pytestmark = pytest.mark.once

GOLDENS = Path(__file__).parent / "goldens"
K, M, G = 2**10, 2**20, 2**30
RAISED = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate {} bytes.\n"
NO_FAILURE = (
    "2026-03-02 10:11:12.000001: W external/xla/bfc_allocator.cc:310] Allocator (GPU_1_bfc) ran out of "
    "memory trying to allocate {} with freed_by_count=0. The caller indicates that this is not a failure, but this may "
    "mean that there could be performance gains if more memory were available.\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/{}", line {}, in step\n    x\n'

OLD_TABLE = """RuntimeError: Resource exhausted: From /job:tpu_worker/replica:0/task:0:
Attempting to reserve 2.75G at the bottom of memory. That was not possible. There are 1.25G free, 0B reserved, and \
1.25G reservable.;
HBM capacity 8.00G:
       Top-of-Memory reserved:  512.00M (     536,870,912 bytes)
          Currently allocated:    6.25G (   6,710,886,400 bytes)
          Program requirement:    2.75G (   2,952,790,016 bytes)
                               ------------
      Available after request:   -1.50G (  -1,610,612,736 bytes)
; attempting reservation for program memory

Total hbm usage >= 9.50G:
    reserved(Infeed/Outfeed/Continuations) 512.00M
    heap allocations (without fragmentation)   6.25G
    program                    2.75G

Heap allocator status:
    Max free chunk             1.25G (0.0% fragmentation)

Persistent allocations include some or all of:
    arguments                768.00M (89.0% utilization)
    output                     5.00G (71.0% utilization) [may share some memory with arguments]

Program hbm requirement 2.75G:
    reserved           4.0K
    scoped           16.00M
    HLO temp          2.50G (97.0% utilization: Unpadded (2.40G) Padded (2.50G), 0.4% fragmentation (10.00M))
    overlays         64.0K
"""  # fmt: skip

LAUNCHERS = {
    "ray": "(train_fn pid=41, ip=10.0.0.9) ",
    "ray without a pid": "(pid=, ip=10.0.0.9) ",
    "torchrun": "[rank3]: ",
    "torchelastic": "[default3]:",
    "slurm": "12: ",
    "mpi": "[1,3]<stderr>:",
    "docker compose": "trainer-1  | ",
    "kubectl": "[pod/train-0/main] ",
    "cri": "2026-03-02T10:11:12.123456789Z stderr F ",
    "journald": "Mar  2 10:11:12 node7 python[4242]: ",
    "absl": "E0302 10:11:12.345678 140123 train.py:88] ",
    "absl early": "E0000 00:00:1773083052.386377   70889 tpu_client.cc:1056] ",
    "tsl": "2026-03-02 10:11:12.000001: E external/xla/xla/util.cc:76] ",
    "logging": "2026-03-02 10:11:12,345 - train.loop - ERROR - ",
    "loguru": "2026-03-02 10:11:12.345 | ERROR    | train:main:88 - ",
    "hydra": "[2026-03-02 10:11:12,345][train][ERROR] - ",
    "vllm in ray": "(EngineCore pid=41) ERROR 03-02 10:11:12 [core.py:396] ",
    "colours": "\x1b[36m(w pid=41)\x1b[0m ",
}


def read(text):
    said = explain_oom(text)
    return said.kind, said.memory, said.where, {f.name: f.size_bytes for f in said.facts}, len(said.buffers)


@pytest.mark.parametrize("prefix", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize("name", ["tpu_report", "gpu_bfc", "cgroup", "killed", "numpy", "old"])
def test_a_prefix_on_each_line_changes_nothing(prefix, name):
    text = OLD_TABLE if name == "old" else (GOLDENS / f"{name}.txt").read_text()
    assert read("".join(prefix + line for line in text.splitlines(True))) == read(text)


@pytest.mark.parametrize("name", ["tpu_report", "gpu_bfc", "old"])
def test_an_unknown_prefix_loses_no_row_and_no_buffer(name):
    text = OLD_TABLE if name == "old" else (GOLDENS / f"{name}.txt").read_text()
    unknown = "".join(f"10:11:12 node-7/train> {line}" for line in text.splitlines(True))
    assert read(unknown)[3]["requested" if name != "tpu_report" else "used"]
    assert read(unknown)[3:] == read(text)[3:]


@pytest.mark.parametrize("name", ["tpu_report", "gpu_bfc"])
def test_json_round_each_line_or_all_of_them(name):
    text = (GOLDENS / f"{name}.txt").read_text()
    docker = "".join(json.dumps({"log": line, "stream": "stderr"}) + "\n" for line in text.splitlines(True))
    nested = json.dumps({"severity": "ERROR", "resource": {"n": 1}, "jsonPayload": {"message": text}}) + "\n"
    for logged in (docker, nested, nested[: len(nested) - 40]):
        assert read("step 1\n" + logged)[3:] == read(text)[3:]


def test_of_two_interleaved_processes_the_first_to_fail_is_told():
    one = [f"(w pid=1) {line}" for line in OLD_TABLE.splitlines()]
    two = [f"(w pid=2) {line}" for line in OLD_TABLE.replace("2.75G", "3.75G").replace("5.00G", "4.00G").splitlines()]
    said = explain_oom("\n".join(line for pair in zip(one, two, strict=True) for line in pair))
    facts = {fact.name: fact.size_bytes for fact in said.facts}
    assert (said.requested_bytes, facts["outputs"], said.others) == (2.75 * G, 5 * G, 1)


def test_a_progress_bar_that_the_error_ends():
    said = explain_oom(" 10%|#  | 10/99\r 11%|#  | 11/99\r" + RAISED.format(3 * G))
    assert said.requested_bytes == 3 * G and said.headline.startswith("jax.errors") and said.line == 1


@pytest.mark.parametrize("sizes", [("2.25GiB",), ("2.25GiB", "4.50GiB", "1.00GiB")])
def test_warnings_that_are_no_failure_are_counted_and_nothing_more(sizes):
    warned = "".join(NO_FAILURE.format(size) for size in sizes)
    said = explain_oom(warned + RAISED.format(5 * G))
    assert (said.requested_bytes, said.others) == (5 * G, 0)
    assert any(f"Left out: {len(sizes)} warning" in note for note in said.notes)
    with pytest.raises(NoOomFound, match=rf"only {len(sizes)} warning"):
        explain_oom(warned + "step 2 loss 0.1\n")


def test_any_number_of_them_hides_no_report():
    warned = NO_FAILURE.format("2.25GiB") * (2 * MOST_REPORTS)
    real = NO_FAILURE.format("6.00GiB").split(" with freed")[0] + "\n"
    said = explain_oom(warned + real + "a long dump\n" * 5000)
    assert said.requested_bytes == 6 * G and said.line == 2 * MOST_REPORTS + 1


def test_what_the_compiler_suppressed_is_no_failure():
    line = "Suppressing OOM due to xla_tpu_no_crash_on_oom: Ran out of memory in memory space hbm. Used 3G of 2G hbm.\n"
    with pytest.raises(NoOomFound):
        explain_oom(line)


def test_a_pool_that_the_driver_refuses_is_asked_for_again_with_less():
    line = "E cuda_driver.cc:828] failed to allocate {}.00G ({} bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: no\n"
    refused = "".join(line.format(size, size * G) for size in (40, 36, 32))
    said = explain_oom(refused)
    assert (said.requested_bytes, said.repeats, said.others) == (40 * G, 2, 0)
    assert "other process" in said.advice[0].title and "40.00 GiB" in said.advice[0].because
    assert explain_oom(refused + RAISED.format(3 * G)).requested_bytes == 3 * G


def test_what_was_caught_is_not_what_ended_the_program():
    caught = TRACEBACK.format("tune.py", 5) + RAISED.format(9 * G) + "trying half of it\nstep 1 loss 2.0\n"
    said = explain_oom(caught + TRACEBACK.format("train.py", 7) + RAISED.format(3 * G))
    assert (said.requested_bytes, said.where, said.others) == (3 * G, "train.py:7 in step", 1)


@pytest.mark.parametrize(
    "link",
    ["During handling of the above exception, another exception occurred:",
     "The above exception was the direct cause of the following exception:"],
)  # fmt: skip
def test_what_a_traceback_leads_back_to_is(link):
    root = TRACEBACK.format("train.py", 7) + RAISED.format(9 * G)
    said = explain_oom(f"{root}\n{link}\n\n{TRACEBACK.format('save.py', 9)}{RAISED.format(3 * G)}")
    assert (said.requested_bytes, said.where, said.others) == (9 * G, "train.py:7 in step", 1)


@pytest.mark.parametrize("end", ["Killed", "exit code 137", "DataLoader worker (pid 3) is killed by signal: Killed."])
def test_a_launcher_that_kills_the_rest_is_not_the_cause(end):
    assert explain_oom(f"step 1\n{RAISED.format(3 * G)}{end}\n").kind == "gpu_bfc"
    assert explain_oom(f"step 1\n{end}\n").kind == "killed"


def test_an_allocators_warning_is_less_than_the_error_that_came_of_it():
    retried = NO_FAILURE.format("8.00GiB").split(" with freed")[0] + "\n"
    said = explain_oom(retried + "(recovered)\n" * 60 + RAISED.format(2 * G))
    assert said.requested_bytes == 2 * G and explain_oom(retried).requested_bytes == 8 * G
    logged = "W0302 10:11:12.345678 9 conv_algorithm_picker.cc:7] " + RAISED.format(7 * G)
    assert explain_oom(logged + RAISED.format(2 * G) + logged).requested_bytes == 2 * G


@pytest.mark.parametrize(
    "line, kind, requested",
    [
        ("failed to alloc 8589934592 bytes on host: CUDA_ERROR_INVALID_VALUE: invalid argument", "pinned", 8 * G),
        ("could not allocate pinned host memory of size: 2147483648", "pinned", 2 * G),
        ("INTERNAL: Failed to allocate 3.00GiB (3221225472 bytes) of pinned host memory: out", "pinned", 3 * G),
        ("INTERNAL: Failed to allocate 1.00GiB (1073741824 bytes) of host memory pinned to NUMA node 1", "pinned", G),
        ("Failed to allocate a 4194304-byte pinned host staging buffer for a transfer.", "pinned", 4 * M),
        ("Allocator (xla_gpu_host_bfc) ran out of memory trying to allocate 14.00GiB (rounded to 1)", "pinned", 14 * G),
        ("Allocator (mklcpu) ran out of memory trying to allocate 14.00GiB", "cpu_xla", 14 * G),
        ("OSError: [Errno 12] Cannot allocate memory", "python_memory", None),
        ("Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: 7) where the "
         "task was running was 60.5GB / 64.0GB (0.945)", "ray", None),
    ],
)  # fmt: skip
def test_host_memory_is_not_the_devices(line, kind, requested):
    said = explain_oom(line + "\n")
    assert (said.kind, said.memory, said.requested_bytes) == (kind, "host", requested)
    assert "accumulation" not in said.advice[0].how or kind == "cpu_xla"
    assert kind != "ray" or (said.used_bytes, said.limit_bytes) == (60.5 * G, 64 * G)


def test_a_devices_pool_is_not_the_hosts():
    said = explain_oom("Allocator (GPU_0_bfc) ran out of memory trying to allocate 14.00GiB\n")
    assert (said.kind, said.memory) == ("gpu_bfc", "hbm")


def test_each_row_of_an_older_table_has_its_own_name():
    facts = {fact.name: fact.size_bytes for fact in explain_oom(OLD_TABLE).facts}
    assert facts == {
        "requested": 2.75 * G, "free": 1.25 * G, "reservable": 1.25 * G, "limit": 8 * G,
        "top_of_memory_reserved": 512 * M, "allocated": 6.25 * G, "program_requirement": 2.75 * G,
        "total": 9.5 * G, "reserved": 512 * M, "heap_allocations": 6.25 * G, "program": 2.75 * G,
        "largest_free": 1.25 * G, "arguments": 768 * M, "outputs": 5 * G, "program_reserved": 4 * K,
        "scoped": 16 * M, "temporaries": 2.5 * G, "fragmentation": 10 * M, "overlays": 64 * K,
    }  # fmt: skip


def test_what_a_training_log_says_below_a_table_is_no_row():
    log = "\nBatch Size: 32\ntokens 1.5M\nreserved 3.00G of the queue\nepoch 3\nmemory 9.5G\n"
    assert read(OLD_TABLE + log)[3:] == read(OLD_TABLE)[3:]


@pytest.mark.parametrize(
    "text, needed, limit",
    [
        ("Compilation failure: Aborting compilation early because it's unlikely to have enough device memory. Requires "
         "96.00G, has 31.25G available. If more detailed logging is desired, set", 96 * G, 31.25 * G),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space cmem. Used 130.00M of 128.00M cmem.", 130 * M, 128 * M),
    ],
)  # fmt: skip
def test_a_compiler_that_gives_up(text, needed, limit):
    said = explain_oom(text + "\n")
    assert (said.backend, said.when, said.used_bytes, said.limit_bytes) == ("tpu", "compile", needed, limit)
    assert said.missing_bytes == needed - limit


def test_a_warning_that_is_no_failure_gives_no_numbers_to_an_error_without_any():
    text = "E cuda_dnn.cc:5] Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED\n" + NO_FAILURE.format("2.25GiB")
    assert explain_oom(text).requested_bytes is None


def test_a_path_on_windows_is_no_escaped_line():
    text = 'Traceback (most recent call last):\n  File "C:\\new\\train.py", line 3, in step\n' + RAISED.format(G)
    assert explain_oom(text).where == "train.py:3 in step"


def test_notebook_tracebacks_name_the_cell_or_the_file():
    cell = "XlaRuntimeError                 Traceback (most recent call last)\nCell In[3], line 12, in step(x)\n"
    text = cell + "File ~/env/lib/python3.11/site-packages/jax/_src/api.py:92, in wrapper(f)\n" + RAISED.format(G)
    assert explain_oom(text).where == "Cell In[3]:12 in step"
    assert explain_oom(text.replace("File ~/env", "File ~/net.py:8, in f(x)\nFile ~/env")).where == "net.py:8 in f"
