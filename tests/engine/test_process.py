"""What a process takes and gives back, with 288 MiB of experts; a processor that names instructions and traps them.

What is measured is a process's own memory, whatever others take meanwhile.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.engine import process as instructions
from expertly.engine.process import (
    VARIABLE,
    WITHOUT_AMX,
    code_in,
    keep_off_trapped_instructions,
    rss_nbytes,
)
from tests.commands import RunningCommand
from tests.engine.observe import run_python
from tests.families import generate

MIB = 1 << 20


PEAKS = """
import subprocess, sys
from expertly.engine.process import peak_rss_nbytes
before = peak_rss_nbytes()
if sys.argv[1:]:
    block = bytearray(before + (256 << 20))
    print(subprocess.check_output([sys.executable, "-c", sys.argv[1]], text=True))
    del block
print(before, peak_rss_nbytes() - before)
"""


def test_peak_counts_memory_that_was_given_back_of_this_process_alone() -> None:
    done = run_python(PEAKS, PEAKS)
    child, _, _, grown = map(int, done.stdout.split())
    assert 5 * MIB < child < 256 * MIB, done.stderr
    assert grown >= 256 * MIB


AMX = "processor : 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n"


def trap() -> None:
    os.kill(os.getpid(), signal.SIGILL)


CPUS: dict[str, tuple[str | None, str | None, Any, bool]] = {
    "traps": (AMX, None, trap, True),
    "works": (AMX, None, lambda: None, False),
    "fails otherwise": (AMX, None, lambda: 1 / 0, False),
    "does not end": (AMX, None, lambda: time.sleep(60), True),
    "the user chose": (AMX, "AVX2", trap, False),
    "another processor": ("flags : fpu avx2\n", None, trap, False),
    "no file": (None, None, trap, False),
}
"""/proc/cpuinfo, what the user chose, what multiplying does, and whether the instructions are off afterwards."""


@pytest.mark.parametrize("case", CPUS)
def test_what_traps_is_switched_off(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo, chosen, multiply, is_off = CPUS[case]
    monkeypatch.setattr(instructions, "_PATIENCE_S", 0.5 if case == "does not end" else 60.0)
    monkeypatch.delenv(VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert keep_off_trapped_instructions(tmp_path / "cpuinfo", multiply) == is_off
    assert os.environ.get(VARIABLE) == (WITHOUT_AMX if is_off else chosen)


def make_big_store(
    folder: Path,
    num_layers: int = 6,
    num_experts: int = 16,
    hidden_size: int = 512,
    intermediate_size: int = 512,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
) -> Path:
    """A store of 3 MiB experts, quickly: 48 MiB a layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from expertly.model.packing import pack

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=128, hidden_size=hidden_size, moe_intermediate_size=intermediate_size,
        intermediate_size=64, head_dim=16,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, num_experts=num_experts,
        num_experts_per_tok=4, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            flat[: 1 << 16].uniform_(-0.1, 0.1)
            for start in range(1 << 16, len(flat), 1 << 16):
                flat[start : start + (1 << 16)] = flat[: len(flat[start : start + (1 << 16)])]
    model.save_pretrained(folder / "checkpoint")
    del model
    return pack(folder / "checkpoint", folder / "store", quantize=quantize).folder


@pytest.fixture(scope="module")
def big_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_big_store(tmp_path_factory.mktemp("big"))


@pytest.mark.parametrize("end", ["unload", "del"])
def test_unload_gives_the_memory_back(end: str, big_store: Path) -> None:
    model, _ = expertly.load(str(big_store), memory="70%", device="cpu")
    generate(model, [torch.randint(2, 128, (64,)).tolist()], 4)
    nbytes = expertly.stats(model).as_dict()["memory_bytes"]
    assert nbytes > 190 << 20
    full = rss_nbytes()
    if end == "unload":
        expertly.unload(model)
    else:
        del model
        gc.collect()
    freed = full - rss_nbytes()
    assert freed > 0.9 * nbytes, f"{freed >> 20} of {nbytes >> 20} MiB came back"


PEAK = """
import sys, torch, transformers
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, GenerationConfig
import transformers.models.qwen3_moe.modeling_qwen3_moe, transformers.generation.utils, safetensors.torch
from expertly.engine.process import peak_rss_nbytes
before = peak_rss_nbytes()
import expertly
model, _ = expertly.load(sys.argv[1], memory="25%", system="expertly:segments=4", device="cpu")
ids = torch.randint(2, 128, (1, 64), generator=torch.Generator().manual_seed(0))
model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
stats = expertly.stats(model).as_dict()
from expertly.api import handle
print(peak_rss_nbytes() - before, handle(model).store.dense_nbytes, stats["memory_bytes"], stats["expert_bytes"])
"""


def test_peak_memory_is_dense_weights_and_budget(big_store: Path) -> None:
    result = run_python(PEAK, str(big_store))
    assert result.returncode == 0, result.stderr
    taken, dense, budget, experts = map(int, result.stdout.split())
    assert experts == 288 << 20
    assert taken < dense + budget + (100 << 20), f"{taken >> 20} MiB for {dense >> 20} + {budget >> 20}"


BESIDE = """
import sys, torch
torch.set_num_threads(1)
import expertly
from expertly.api import handle
from expertly.engine.process import peak_rss_nbytes, rss_nbytes
model, _ = expertly.load(memory="25%", device="cpu")
resident, dice = [], torch.Generator().manual_seed(0)
for num_tokens in (96, 144, 240):
    ids = torch.randint(2, 8000, (1, num_tokens), generator=dice)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    resident.append(rss_nbytes())
weights = handle(model).store.dense_nbytes + expertly.stats(model).as_dict()["memory_bytes"]
print(peak_rss_nbytes() - weights, *resident)
"""


def test_little_memory_is_taken_beside_weights_and_cache() -> None:
    """Whatever lengths prompts have: each gives experts other numbers of rows."""
    result = run_python(BESIDE)
    assert result.returncode == 0, result.stderr
    peak, *resident = map(int, result.stdout.split())
    assert peak <= 410 * 10**6, f"{peak / 1e6:.0f} MB"
    assert resident[-1] - resident[1] < 16 << 20, "new lengths cost nothing that stays"


GIVE_BACK = """
from expertly.engine.process import give_back_code, keep_off_trapped_instructions
keep_off_trapped_instructions()
import torch
torch.set_num_threads(1)
from expertly.engine.process import rss_nbytes
x = torch.ones(64, 64, dtype=torch.bfloat16)
before, product = rss_nbytes(), torch.nn.functional.linear(x, x)
given = give_back_code()
again = torch.nn.functional.linear(x, x)
print(before - rss_nbytes(), given, bool((again == product).all()), again[0, 0].item())
"""


def test_threads_that_a_thread_computed_with_end_with_its_call(
    tmp_path: Path, start: Callable[..., RunningCommand]
) -> None:
    """Else those of other threads sleep after every product, as all together are more than the processors."""
    (tmp_path / "threads.py").write_text(
        """if True:
        import os, threading
        import expertly, torch

        def count():
            print(len(os.listdir("/proc/self/task")))

        def generate():
            model.generate(torch.arange(4, 100)[None], max_new_tokens=2)

        def generate_and_stay():
            generate()
            count()
            ready.release()
            ends.wait()

        torch.set_num_threads(2)
        model, _ = expertly.load(None, system="resident")
        count()
        torch.ones(1 << 22).exp_()
        count()
        generate()  # begins the kernels' own threads, too, which all share
        count()
        ready, ends = threading.Semaphore(0), threading.Event()
        for _ in range(2):
            threading.Thread(target=generate_and_stay).start()
            ready.acquire()
        torch.ones(1 << 22).exp_()
        count()
        ends.set()
        """
    )
    done = start(tmp_path / "threads.py")
    assert done.exit_code(120) == 0, done.err
    loaded, computed, before, first, second, last = map(int, done.out.split())
    assert computed - loaded == 1, "loading's had ended"
    assert first - before == 1 and second - before == 2, "no thread but the two that called it"
    assert last - before == 3, "a product has a team of two"


def test_code_that_only_importing_ran_is_given_back_and_products_run_on_this_machine() -> None:
    result = run_python(GIVE_BACK)
    assert result.returncode == 0, result.stderr
    freed, values, is_same, value = result.stdout.split()
    assert int(values) > 20 << 20 and int(freed) > int(values) // 2, "it is resident no more"
    assert (is_same, value) == ("True", "64.0"), "and what is needed again comes back"


def smaps(*regions: tuple[str, int]) -> str:
    """Of memory of two pages each: how it is mapped, and how much of it was written to."""
    lines = [
        f"{2 * number + 1:x}000-{2 * number + 3:x}000 {mapping}\nRss: 8 kB\nAnonymous: {changed} kB"
        for number, (mapping, changed) in enumerate(regions)
    ]
    return "\n".join([*lines, "VmFlags: rd ex\n"])


def test_only_code_that_can_be_read_again_is_given_back() -> None:
    code, data = "r-xp 00000000 fe:00 12    /usr/lib/lib with space.so", "rw-p 00000000 fe:00 12    /usr/lib/lib.so"
    text = smaps((code, 0), (code, 4), (data, 0), ("r-xp 00000000 00:00 0", 0), (f"{code} (deleted)", 0), (code, 0))
    assert code_in(text) == [(0x1000, 0x3000, 8192), (0xB000, 0xD000, 8192)]


CGROUPS = Path("/sys/fs/cgroup/memory")

LOAD = """
import sys
open(sys.argv[2] + "/cgroup.procs", "w").write("0")
import torch
torch.set_num_threads(1)
import expertly
ids = torch.randint(2, 128, (1, 64), generator=torch.Generator().manual_seed(0))
for budget in ({"memory": "auto"}, {"total_memory": 500 << 20}):
    model, _ = expertly.load(sys.argv[1], context=128, device="cpu", **budget)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    stats = expertly.stats(model).as_dict()
    expertly.unload(model)
    print(stats["memory_bytes"], stats["expert_bytes"], stats["bytes_loaded"])
    print(stats["memory_reason"])
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup (version 1) of our own, of 500 MiB."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="expertly-test-", dir=CGROUPS))
        (folder / "memory.limit_in_bytes").write_text(str(500 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
    yield folder
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def test_what_is_left_fits_a_memory_cgroup(big_store: Path, cgroup: Path) -> None:
    result = run_python(LOAD, str(big_store), str(cgroup))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for numbers, reason, says in zip(
        lines[::2], lines[1::2], ("memory auto: ", f"total memory {500 << 20}: "), strict=True
    ):
        budget, experts, nbytes_loaded = map(int, numbers.split())
        assert 0 < budget < experts < nbytes_loaded, "it took what the group leaves and streamed the rest"
        assert reason.startswith(says) and "% of the experts" in reason


WIDE = """
import sys
group = sys.argv[2]
open(group + "/cgroup.procs", "w").write("0")
import torch
torch.set_num_threads(1)
import expertly
from expertly import api
room = int(open(group + "/memory.usage_in_bytes").read()) + (112 << 20)
open(group + "/memory.limit_in_bytes", "w").write(str(room))
model, _ = expertly.load(sys.argv[1], memory="auto", context=264, system="lru", device="cpu")
ids = torch.randint(2, 128, (1, 256), generator=torch.Generator().manual_seed(0))
for _ in range(2):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
stats = expertly.stats(model).as_dict()
print(stats["memory_bytes"], stats["expert_bytes"])
"""


def test_a_prompt_of_a_quantised_model_with_wide_experts_fits_what_is_left(
    tmp_path: Path, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert of 1.7 MiB is 12 MiB when it is decoded, and activations of a token are 256 KiB. Without instructions
    for bfloat16, oneDNN has results in float32 beside them, which is most.
    """
    sizes = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 16384}
    store = make_big_store(tmp_path, **sizes, dtype=torch.bfloat16, quantize="int4")
    monkeypatch.setenv(VARIABLE, "AVX512_CORE_VNNI")
    result = run_python(WIDE, str(store), str(cgroup))
    assert result.returncode == 0, result.stderr or "killed"
    budget, experts = map(int, result.stdout.split())
    assert 0 < budget < experts
