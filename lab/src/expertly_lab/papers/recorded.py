"""Traces that are made here: the demo model's, recorded once and kept in the cache folder where a user has none; and
routing that is made up for models that are not at hand, which says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.store.cache import cache_folder
from expertly_lab.papers.runs import Subject
from expertly_lab.sim.geometries import read_geometry
from expertly_lab.synth import write_workload, zipf
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.writer import remove_trace

DEMO = "demo"
"""As `--trace` names it."""
PROMPTS = {False: 90, True: 30}
"""By --quick."""
NEW_TOKENS = {False: 48, True: 32}
TEMPLATES = {
    "story": "Once upon a time there was {} who wanted to see {}. One morning",
    "question": "Question: what is {} good for, and why do people compare it with {}? Answer:",
    "sums": "{} costs 12 coins and {} costs 7 coins. How many coins do 3 of each cost? Let us think step by step.",
    "code": "def find_experiment(items):\n    # returns {} that comes before {} in the list\n",
    "instruction": "Instruction: write a short letter about {} to a friend who likes {}.\nResponse:",
}
FIRST = ("an old fisherman", "a clock", "the smallest boat", "a wooden bridge", "a grey cat", "the last train")
SECOND = ("the sea", "a garden", "the mountains", "music")


def prompts(num: int) -> list[tuple[str, str]]:
    """So many prompts of five categories in turn, no two alike: (category, prompt)."""
    pairs = [(first, second) for first in FIRST for second in SECOND]
    every = [
        (category, template.format(*pairs[(5 * at + which) % len(pairs)]))
        for at in range(len(pairs))
        for which, (category, template) in enumerate(TEMPLATES.items())
    ]
    return every[:num]


def demo_trace(quick: bool, say: Callable[[str], None]) -> Path:
    """The demo model's answers to prompts made up here, recorded in full, once; in the cache folder."""
    folder = cache_folder() / "reproduce" / f"demo-{PROMPTS[quick]}"
    if (folder / "manifest.json").is_file():
        return folder
    say(f"expertly: recording the demo model's answers to {PROMPTS[quick]} prompts, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        _record(made, PROMPTS[quick], NEW_TOKENS[quick])
        try:
            remove_trace(folder)  # what another version left
            made.replace(folder)
        except OSError as error:
            if not (folder / "manifest.json").is_file():  # else another process was first
                raise ExpertlyError(f"{folder}: the recording could not be kept ({error}); give --trace") from None
    return folder


def _record(out: Path, num_prompts: int, num_tokens: int) -> None:
    from expertly import api
    from expertly.model.playing import answer
    from expertly_lab.playing import chooser
    from expertly_lab.recording import record

    model, tokenizer = api.load(None, system="resident", learned="off", device="cpu")
    choose = chooser(0.8, 0)
    try:
        with record(model, out, full=True, name="demo") as recording:
            for category, prompt in prompts(num_prompts):
                tokens = tokenizer(prompt, return_token_type_ids=False)["input_ids"]
                recording.begin_request(category, prompt, len(tokens))
                answer(model, tokens, num_tokens, choose)
    finally:
        api.unload(model)


@dataclass(frozen=True, slots=True)
class MadeUpRouting:
    """Routing that has what is known of a model's, and its sizes."""

    title: str
    num_layers: int
    layer: LayerGeometry
    dense: DenseShape | None
    exponent: float  # of Zipf's law
    keep: float  # how often an expert of the token before is kept
    lookahead: float  # how often the next layer's router, asked early, is right


MIXTRAL, QWEN = "mixtral, made up", "qwen1.5-moe, made up"
REQUESTS, PROMPT, ANSWER = 54, 64, 192


def _models() -> dict[str, MadeUpRouting]:
    """Mixtral: 16 % the most popular expert (12.5 would be even); consecutive tokens share one in 62 % of all cases
    (Jiang et al., 2024, table 5, has 62 to 67 % in the middle of the model); lookahead as right as ProMoE, section 4,
    has it. 2 bits a weight, said as an eighth of the neurons at 2 bytes: as MoEpic serves it (its section 4.1).

    Qwen1.5-MoE: with 10, 20 and 40 of 60 experts kept LRU hits 19, 38 and 71 %, LFU 25, 45 and 75 % (MoEpic, table 1:
    19, 39, 73 and 24, 44, 76); of 4 experts 2.07 to 3.39 are foretold (its figure 2c), here 2.9.
    """
    qwen = read_geometry("qwen1.5-moe")
    return {
        MIXTRAL: MadeUpRouting(
            "Mixtral-8x7B's sizes at 2 bits",
            32,
            LayerGeometry(8, 2, 4096, 1792, 3, 2),
            DenseShape(layer_nbytes=21_053_440, head_nbytes=262_160_384),
            *(0.2, 0.15, 0.905),
        ),
        QWEN: MadeUpRouting("Qwen1.5-MoE's sizes", qwen.num_layers, qwen.layer, qwen.dense, *(0.35, 0.01, 0.72)),
    }


def made_up(name: str, scratch: Path, seed: int) -> Subject:
    """Routing of that name, written below `scratch`."""
    model = _models()[name]
    num_rows = REQUESTS * (PROMPT + ANSWER)
    shape = (model.num_layers, model.layer.num_experts, model.layer.top_k, num_rows)
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "made-up"
    write_workload(
        folder,
        zipf(*shape, exponent=model.exponent, keep=model.keep, seed=seed),
        model=name.partition(",")[0],
        num_requests=REQUESTS,
        prefill_tokens=PROMPT,
        lookahead=model.lookahead,
        seed=seed,
        created="",
        command="",
    )
    sizes = f"{model.title}, lookahead modelled ({model.lookahead:.1%})"
    layers = (model.layer,) * model.num_layers
    return Subject(name, Trace.open(folder), layers, model.dense, sizes, is_made_up=True)
