"""Every format: whose memory, when, and the numbers, from logs in goldens/.

Those named after a JAX version are real texts of that version's TPU compiler (libtpu 0.0.52, v5e), with other
paths; the others are written in the format of public logs and of the message templates in XLA's binaries.
"""

from pathlib import Path

import pytest

from jaxmem.analysis.oom import NoOomFound, explain_oom
from jaxmem.errors import InputError

pytestmark = pytest.mark.once

GOLDENS = Path(__file__).parent / "goldens"
K, M, G = 2**10, 2**20, 2**30

# name: backend, memory, when, requested, used, limit
EXPECTED = {
    "tpu_compile_jax0.10": ("tpu", "hbm", "compile", None, 23.19 * G, 15.75 * G),
    "tpu_compile_jax0.12": ("tpu", "hbm", "compile", None, 16.81 * G, 15.75 * G),
    "tpu_smem_jax0.10": ("tpu", "smem", "compile", 32 * M, None, M),
    "tpu_smem_jax0.12": ("tpu", "smem", "compile", 32 * M, None, M),
    "tpu_vmem_jax0.10": ("tpu", "vmem", "compile", 256 * M, None, 128 * M),
    "tpu_report": ("tpu", "hbm", "compile", None, 18.59 * G, 15.75 * G),
    "tpu_vmem_scoped": ("tpu", "vmem", "compile", 24.5 * M, None, 16 * M),
    "tpu_run": ("tpu", "hbm", "run", 4 * G, None, None),
    "tpu_load": ("tpu", "hbm", "run", 9.28 * G, None, None),
    "gpu_bfc": ("gpu", "hbm", "run", 10 * G, 8 * G, 12 * G),
    "gpu_driver": ("gpu", "hbm", "run", 2 * G, None, None),
    "gpu_graph": ("gpu", "hbm", "run", None, None, None),
    "gpu_nccl": ("gpu", "hbm", "run", None, None, None),
    "gpu_scratch": ("gpu", "hbm", "run", 2 * G, None, None),
    "cpu_xla": ("cpu", "host", "run", 2**40, None, None),
    "numpy": ("host", "host", "run", 1.31 * 2**40, None, None),
    "bad_alloc": ("host", "host", "run", None, None, None),
    "kernel": ("host", "host", "run", None, 30 * G, None),
    "cgroup": ("host", "host", "run", None, 16736460 * K, 16 * G),
    "slurm": ("host", "host", "run", None, None, None),
    "killed": ("host", "host", "run", None, None, None),
    "exit_137": ("host", "host", "run", None, None, None),
}


def golden(name):
    return explain_oom(GOLDENS / f"{name}.txt")


def test_every_golden_is_expected():
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_who_when_and_how_much(name):
    said = golden(name)
    sizes = (said.requested_bytes, said.used_bytes, said.limit_bytes)
    wanted = tuple(None if size is None else round(size) for size in EXPECTED[name][3:])
    assert (said.backend, said.memory, said.when, *sizes) == (*EXPECTED[name][:3], *wanted)
    assert said.advice and all(advice.because for advice in said.advice)
    assert said.others == 0


def test_the_tpu_report_gives_buffers_with_layer_line_and_padding():
    said = golden("tpu_report")
    first, padded = said.buffers[0], said.buffers[-1]
    assert (first.size_bytes, first.shape, first.layer) == (6 * G, "bf16[12,32,2048,4096]", "GPT/mlp")
    assert (first.source, first.source_file, first.allocation) == ("gpt.py:51", "/home/me/gpt.py", "HLO temp")
    assert padded.padding_bytes == 500 * M
    assert said.missing_bytes == round(2.84 * G)
    assert said.where == "train.py:88 in main"


def test_the_tpu_report_leads_to_recomputing_chunking_and_padding():
    titles = {advice.title: advice.saves_bytes for advice in golden("tpu_report").advice}
    assert titles["recompute the blocks' activations in the backward pass"] == 6 * G
    assert titles["compute the loss in chunks of the sequence"] == 3.5 * G
    assert titles["change the shapes that the TPU pads"] == 500 * M
    assert "cut the batch into 2 micro-batches" in titles


def test_the_gpu_dump_gives_statistics_and_peak_buffers():
    said = golden("gpu_bfc")
    assert [b.size_bytes for b in said.buffers] == [6 * G, 2 * G, G]
    assert said.buffers[0].source == "net.py:40" and said.buffers[0].layer == "Net/head"
    assert said.buffers[2].allocation == "argument"
    assert said.free_bytes == 4 * G and said.repeats == 2
    assert said.where == "net.py:90 in <module>"
    assert said.advice[0].title == "compute the loss in chunks of the sequence"


def test_every_fact_is_quoted_from_the_line_that_it_names():
    for path in GOLDENS.glob("*.txt"):
        lines = path.read_text().split("\n")
        for fact in explain_oom(path).facts:
            assert fact.quote in lines[fact.line - 1], (path.name, fact)


def test_the_on_chip_text_names_kernel_and_array():
    said = golden("tpu_smem_jax0.12")
    assert said.program == "double_kernel.1"
    assert said.buffers[0].shape == "s32[8,1048576]" and said.buffers[0].size_bytes == 32 * M


def test_two_different_reports_are_counted():
    text = (GOLDENS / "gpu_driver.txt").read_text() + (GOLDENS / "kernel.txt").read_text()
    said = explain_oom(text)
    assert said.kind == "kernel_kill" and said.others == 1


@pytest.mark.parametrize(
    "line",
    [
        "exited with 137",
        "Container worker exited with 137 after 3 s",
        "exited with exit code 137",
        "    Exit Code:    137",
        '"ExitCode": 137,',
        "trainer-1   Exited (137) 3 minutes ago",
        "exitcode=137",
        "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 137.",
        "the job returned 137",
        "train.sh: line 3:  4242 Killed                  python train.py",
    ],
)
def test_a_killed_process(line):
    said = explain_oom(f"step 1 loss 2.0\n{line}\n")
    assert (said.kind, said.backend, said.line) == ("killed", "host", 2)


@pytest.mark.parametrize(
    "line",
    [
        "exited with 1370",
        "exited with 1 after 137 steps",
        "exit code 1, step 137",
        "returned 137 rows",
        "exited with 137 errors",
        "NoKilled",
        "was Killed by the user",
        "CustomMemoryError: x",
        '"OOMKilled": false',
    ],
)
def test_what_only_looks_like_a_killed_process(line):
    with pytest.raises(NoOomFound):
        explain_oom(f"step 1 loss 2.0\n{line}\n")


@pytest.mark.parametrize(
    "line, requested",
    [
        ("enqueue.cc:99 NCCL WARN Cuda failure 2 'out of memory'", None),
        ("Last NCCL warning(error) log entry (may be unrelated) 'Cuda failure 'out of memory''.", None),
        ("include/alloc.h:205 NCCL WARN Failed to CUDA calloc async 608 bytes", 608),
        ("include/alloc.h:185 NCCL WARN Failed to CUDA calloc 67108864 bytes", 64 * M),
        ("include/alloc.h:70 NCCL WARN Failed to CUDA host alloc 4194304 bytes", 4 * M),
        ("include/alloc.h:70 NCCL WARN Failed to CUDA malloc 4194304 bytes", 4 * M),
        ("ncclUnhandledCudaError: CUDA error: out of memory", None),
    ],
)
def test_what_nccl_says_of_the_device(line, requested):
    said = explain_oom(f"{line}\n")
    assert (said.kind, said.backend, said.requested_bytes) == ("gpu_library", "gpu", requested)


@pytest.mark.parametrize(
    "line, kind, requested",
    [
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-vNRKHH to 9637892 bytes", "nccl_shm", 9637892),
        ("NCCL WARN Call to shm_open /dev/shm/nccl-x failed : No space left on device", "nccl_shm", None),
        ("include/alloc.h:30 NCCL WARN Failed to malloc 1048576 bytes", "cpp_memory", M),
    ],
)
def test_what_nccl_says_of_the_host(line, kind, requested):
    said = explain_oom(f"{line}\n")
    assert (said.kind, said.memory, said.requested_bytes) == (kind, "host", requested)
    assert kind != "nccl_shm" or "--shm-size" in said.advice[0].how


@pytest.mark.parametrize("text", ["", "step 1 loss 2.0\n", "Out of memory", "\0" * 100])
def test_a_text_without_one_is_refused(text):
    with pytest.raises(NoOomFound, match="none in a text"):
        explain_oom(text + "\n")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere.log"):
        explain_oom(tmp_path / "nowhere.log")
