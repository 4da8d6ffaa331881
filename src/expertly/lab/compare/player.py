"""What a child process does with the one model it holds: each method is something its parent can ask for."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import expertly
from expertly.api import handle
from expertly.core.costs import CodecCosts, Link, MeasuredCompute
from expertly.core.errors import ConfigError, ModelUseError
from expertly.engine.device import kind_of
from expertly.engine.learned import find_weights, reuse_models
from expertly.engine.process import peak_rss_nbytes
from expertly.hardware.measure import store_costs
from expertly.lab.compare.playing import PlayedRequest, play
from expertly.lab.fit_decoding import fit_decoding
from expertly.lab.model_profile import Measurement
from expertly.lab.playing import answer, chooser, max_positions
from expertly.lab.recording import record
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.presets import get_system
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.training import histories, teach
from expertly.trace.reader import Trace


class Player:
    """One model at a time."""

    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None
        self._measurement: Measurement | None = None

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """`expertly.load` with these arguments; facts about what was loaded. Raises as it does."""
        self.unload()
        self._model, self._tokenizer = expertly.load(arguments.pop("model"), maps="off", **arguments)
        found, told = handle(self._model), expertly.stats(self._model).as_dict()
        keys = ("memory_bytes", "expert_bytes", "segments", "system")
        return {
            **{key: told[key] for key in keys},
            "codec": told["codec"]["name"],
            "dtype": found.store.manifest.dtype,
            "device": str(self._model.device),
            "identity": found.store.manifest.identity,
            "store": str(found.store.folder),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__.partition("+")[0], "transformers": version("transformers")},
        }

    def unload(self) -> None:
        """Free the model, if there is one."""
        model, self._model, self._measurement = self._model, None, None
        if model is not None:
            expertly.unload(model)

    def peak_nbytes(self) -> int:
        """The most memory that this process has held."""
        return peak_rss_nbytes()

    def tokens(self, texts: list[str], num_new: int) -> list[list[int]]:
        """Of each prompt that the model can be given; an empty list for each of the others."""
        if self._model.config.is_encoder_decoder:
            raise ModelUseError("an encoder-decoder model cannot be compared yet; accepted: one that decodes alone")
        if self._tokenizer is None:
            raise ConfigError("model: has no tokenizer, so prompts have no tokens")
        limit = max_positions(self._model)
        found = [self._tokenizer(text)["input_ids"] for text in texts]
        return [ids if limit is None or len(ids) + num_new <= limit else [] for ids in found]

    def record(
        self, folder: str, requests: list[tuple[str | None, str, list[int]]], num_tokens: int, how: dict[str, Any]
    ) -> list[str]:
        """Answer the requests (category, text, tokens) and write the full trace; why optional fields are absent."""
        choose = chooser(how["temperature"], how["seed"])
        names = {"name": how["name"], "created": how["created"], "command": how["command"]}
        with record(self._model, Path(folder), full=True, **names) as recording:
            for category, text, ids in requests:
                recording.begin_request(category, text, len(ids))
                answer(self._model, ids, num_tokens, choose)
        return [f"{field}: {reason}" for field, reason in recording.absent.items()]

    def learn(self, folder: str, selection: Selection) -> None:
        """Let what predicts and what evicts learn from the training part of a trace, if they do."""
        engine, trace = handle(self._model).engine, Trace.open(Path(folder))
        training = make_schedule(trace, selection).training
        for reuse in reuse_models(engine.executor):
            teach(reuse, trace, training)
        if engine.prefetching is not None:
            predictor = engine.prefetching.predictor
            for history in histories(trace, training, predictor.wants):
                predictor.learn(history)

    def weights(self, predictor: str, systems: list[str]) -> LearnedWeights | None:
        """Of the systems with a learned predictor, if there are any; see `expertly.load`."""
        taking = [system for system in map(get_system, systems) if system.takes_weights]
        return find_weights(predictor, taking[0], handle(self._model).store) if taking else None

    def play(self, request: PlayedRequest) -> dict[str, Any]:
        """See playing.play."""
        return play(self._model, request)

    def measure(self, everything: bool) -> None:
        """What passes and transfers cost with this model: all of it, or once more what a decode step depends on."""
        self._measurement = self._measurement or Measurement(self._model)
        tasks = self._measurement.tasks() if everything else self._measurement.tasks_of_a_token()
        with torch.no_grad():
            for task in tasks:
                task()

    def profile(self) -> tuple[Link, MeasuredCompute, CodecCosts | None]:
        """What was measured. Of a compressed store the link is the disk alone: decoding is added by who simulates."""
        assert self._measurement is not None
        measured, store = self._measurement.profile(), handle(self._model).store
        if store.codec == "none":
            return measured.link, measured.compute, None
        disk, costs = store_costs(store)
        if kind_of(self._model.device).runs_on_host:
            costs = fit_decoding(measured.layers, disk, costs, measured.compute, store.geometry(1))
        return disk, measured.compute, costs
