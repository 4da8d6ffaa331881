"""What `expertly run` imports, and what it takes beside weights; the demo model in a process of its own."""

from __future__ import annotations

from expertly.model.packing import pack_cached
from tests.engine.observe import run_python

RUN = """
import contextlib, io, sys
from expertly.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main("run demo Hello --memory 50% --max-new-tokens 8".split()) == 0
from expertly.engine.process import peak_rss_nbytes
is_there = lambda name: hasattr(sys.modules.get(name), "__file__")  # else it is put off
print(peak_rss_nbytes(), [name for name in sys.argv[1:] if is_there(name)])
import torch, transformers.masking_utils as masks
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel as Stack
own = Stack.__init__
Stack.__init__ = lambda self, config: (own(self, config), torch.fft.fft(torch.empty(4, dtype=torch.float32)))[0]
with contextlib.redirect_stdout(io.StringIO()):
    assert main("run demo Hello --memory 50% --max-new-tokens 2".split()) == 0
print(is_there("torch._meta_registrations"))
print(isinstance(masks.TransformGetItemToIndex(), torch.overrides.TorchFunctionMode), torch._dynamo.config.verbose)
marked = torch.compiler.disable(lambda: 7)
print(marked(), marked._torchdynamo_disable, "torch._dynamo.convert_frame" in sys.modules)
"""

TAILS = (
    "sympy",
    "torch._dynamo.convert_frame",
    "torch._meta_registrations",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "torch.nn.attention.flex_attention",
    "accelerate",
    "transformers.trainer",
    "scipy",
    "sklearn",
    "pandas",
    "matplotlib",
)
"""Each takes 5 to 40 MiB, and no token needs it."""

WEIGHTS_NBYTES = 8336000 + (18 << 20)
"""The dense part of the demo model, and half of its experts."""


def test_run_imports_and_takes_no_more_than_it_needs() -> None:
    pack_cached(None)  # packing imports more
    result = run_python(RUN, *TAILS, limit=240)
    assert result.returncode == 0, result.stderr
    first, needed, second, third = result.stdout.splitlines()
    peak, imported = first.split(maxsplit=1)
    assert imported == "[]"
    beside = int(peak) - WEIGHTS_NBYTES
    assert beside <= 250 << 20, f"{beside / 2**20:.0f} MiB"
    assert second == "True False", "what is asked for after all is imported"
    assert third == "7 True True"
    assert needed == "True", "a family may need more to be built without values"
