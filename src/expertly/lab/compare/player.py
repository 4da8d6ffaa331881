"""A child process's model, and what the parent can ask of it: one method each."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import expertly
from expertly.api import Progress, handle
from expertly.core.errors import ModelUseError
from expertly.engine.learned import find_weights
from expertly.engine.process import peak_rss_nbytes
from expertly.lab.model_profile import Measurement, compressed_costs
from expertly.lab.playing import RecordedRequest, answer, chooser, feed, learn
from expertly.lab.prompts import AskedPrompt, Prompt, asked, has_template
from expertly.lab.recording import record
from expertly.model.generation import max_positions
from expertly.policies.learned import LearnedState
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, make_schedule
from expertly.trace.reader import Trace

PHASES = ("prefill", "decode")


class Player:
    """Holds one model at a time."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._model: Any = None
        self._tokenizer: Any = None
        self._measurement: Measurement | None = None

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call `expertly.load` with these arguments and return facts about the model. Raises as it does."""
        self.unload()
        self._model, self._tokenizer = expertly.load(
            arguments.pop("model"), learned="off", progress=self._progress, **arguments
        )
        found, told = handle(self._model), expertly.stats(self._model).as_dict()
        keys = ("memory_bytes", "expert_bytes", "segments", "system")
        return {
            **{key: told[key] for key in keys},
            "codec": told["codec"]["name"],
            "dtype": found.store.manifest.told_as,
            "device": str(self._model.device),
            "is_templated": has_template(self._tokenizer),
            "identity": found.store.manifest.identity,
            "store": str(found.store.folder),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__.partition("+")[0], "transformers": version("transformers")},
        }

    def unload(self) -> None:
        model, self._model, self._measurement = self._model, None, None
        if model is not None:
            expertly.unload(model)

    def peak_nbytes(self) -> int:
        return peak_rss_nbytes()

    def tokens(self, prompts: list[Prompt], num_new: int, is_raw: bool) -> list[AskedPrompt]:
        """The prompts, as tokens, that leave the model room for so many tokens of answer."""
        if self._model.config.is_encoder_decoder:
            raise ModelUseError("an encoder-decoder model cannot be compared yet; accepted: one that decodes alone")
        limit = max_positions(self._model)
        return asked(prompts, self._tokenizer, is_raw=is_raw, most=None if limit is None else limit - num_new)[0]

    def record(self, folder: str, prompts: list[AskedPrompt], num_tokens: int, how: dict[str, Any]) -> list[str]:
        """Record the answers to the prompts as a full trace; returns which optional fields are absent, and why."""
        choose = chooser(how["temperature"], how["seed"])
        names = {"name": how["name"], "created": how["created"], "command": how["command"]}
        with record(self._model, Path(folder), full=True, **names) as recording:
            for one in prompts:
                recording.begin_request(one.prompt.category, one.prompt.text, len(one.tokens))
                answer(self._model, one.tokens, num_tokens, choose)
        return [f"{field}: {reason}" for field, reason in recording.absent.items()]

    def learn(self, folder: str, selection: Selection) -> None:
        """Let the system learn from the training part of a trace, see playing.learn."""
        trace = Trace.open(Path(folder))
        learn(self._model, trace, make_schedule(trace, selection))

    def weights(self, predictor: str, systems: list[str]) -> LearnedState | None:
        """The trained weights for the systems with a learned predictor; None where there are none."""
        taking = [system for system in map(get_system, systems) if system.takes_weights]
        return find_weights(predictor, taking[0], handle(self._model).store) if taking else None

    def play(self, request: RecordedRequest) -> dict[str, Any]:
        """Feed a recorded request. Returns times in seconds (to the first token, of each later step, in all) and by how
        much each counter rose, by phase.
        """
        before = {phase: self._counts(phase) for phase in PHASES}
        played = feed(self._model, request.tokens, request.num_prompt)
        changed = {}
        for phase in PHASES:
            changed[phase] = {name: count - before[phase][name] for name, count in self._counts(phase).items()}
        times = {"ttft_s": played.ttft_s, "tpot_s": played.tpot_s, "latency_s": played.seconds}
        return {"request": request.number, **times, "num_steps": len(played.steps_s), **changed}

    def _counts(self, phase: str) -> dict[str, int]:
        counters = asdict(expertly.stats(self._model).phase(phase))
        return {name: value for name, value in counters.items() if isinstance(value, int)}

    def measure(self, everything: bool) -> None:
        """Measure passes and transfers with this model: everything, or only what a decode step depends on."""
        self._measurement = self._measurement or Measurement(self._model)
        tasks = self._measurement.tasks() if everything else self._measurement.tasks_of_a_token()
        with torch.no_grad():
            for task in tasks:
                task()

    def profile(self) -> Hardware:
        """What was measured. For a compressed store the link is the disk's alone; the simulator adds decoding."""
        assert self._measurement is not None
        measured = self._measurement.profile()
        found = compressed_costs(self._model, measured)
        link, codec = found or (measured.link, None)
        hardware = Hardware.read("infinite").with_model(link, measured.compute, measured.predictor)
        return replace(hardware, codec=codec)
