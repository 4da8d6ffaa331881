"""Training the learned predictor (ProMoE, section 4): one small network for each pair of layers.

B rows of a batch, H numbers of a router input, N hidden, E experts, M networks that look at the same layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from expertly.core.errors import ConfigError, TraceError
from expertly.core.geometry import ModelShape
from expertly.policies.promoe import LearnedWeights, Mlp, Pair, pairs
from expertly_lab.accuracy import Accuracy, accuracies, means
from expertly_lab.dataset import Dataset, Rows, needed
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.sim.study import Progress
from expertly_lab.trace.reader import Trace

_BLOCK_ROWS = 4096
_OF_CHOICES = 2.0
"""The weight of the choices' loss beside that of the router's scores, where both are known."""
_MAX_SCALE = 6e4
"""The largest scale that float16 can hold."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How the networks are trained. Equal options give equal weights on one machine."""

    distances: tuple[int, ...] = (1, 2, 4, 8)
    hidden: int = 128  # N
    epochs: int = 40  # at most
    patience: int = 4  # epochs without a better network before training ends
    batch: int = 256  # rows
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    seed: int = 0
    device: str = "cpu"
    plain: bool = False  # without the path past the hidden layer, as ProMoE's networks are

    def __post_init__(self) -> None:
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each reason
            reason = str(error).partition("\n")[0]
            problem = f"device={self.device!r}: unknown, or not here ({reason:.100})"
            raise ConfigError(f"{problem}; accepted: cpu, cuda:N") from None


@dataclass(frozen=True, slots=True)
class Trained:
    """The trained networks; for each its epochs and its accuracy on the rows kept back."""

    weights: LearnedWeights
    epochs: dict[Pair, int]
    accuracy: dict[Pair, float]


def train(
    data: Dataset, training: Rows, validation: Rows, options: TrainOptions, progress: Progress | None = None
) -> Trained:
    """Train on `training`, and keep each network as it was when it was best on `validation`. Networks that look at the
    same layer share reading their inputs, but each is trained as if alone. Raises TraceError where no row shows a pair
    of layers.
    """
    num_layers = len(data.layers)
    distances = tuple(dict.fromkeys(max(1, min(distance, num_layers - 1)) for distance in sorted(options.distances)))
    wanted = sorted({pair for distance in distances for pair in pairs(data.starts, distance)})
    by_source: dict[int, list[int]] = {}
    for source, target in wanted:
        by_source.setdefault(source, []).append(target)
    mlps: dict[Pair, Mlp] = {}
    epochs: dict[Pair, int] = {}
    accuracy: dict[Pair, float] = {}
    for source, targets in by_source.items():
        group = _Group(data, source, targets, options)
        networks = group.train(training, validation)
        for target, (mlp, num_epochs, right) in zip(targets, networks, strict=True):
            mlps[source, target], epochs[source, target], accuracy[source, target] = mlp, num_epochs, right
        if progress is not None:
            progress("training", len(mlps), len(wanted))
    layers = data.layers
    shape = ModelShape(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))
    return Trained(LearnedWeights(shape, data.starts, distances, mlps), epochs, accuracy)


class _Group:
    """The networks that look at one layer, trained side by side."""

    def __init__(self, data: Dataset, source: int, targets: Sequence[int], options: TrainOptions) -> None:
        self._data, self._source, self._targets, self._options = data, source, targets, options
        self._num_experts = max(data.layers[target].num_experts for target in targets)
        number = (options.seed * 1_000_003 + source) % (1 << 63)
        generator = torch.Generator().manual_seed(number)  # the same on every device
        sizes = (len(targets), options.hidden, data.hidden_size, self._num_experts)
        num, width, hidden_size, num_experts = sizes

        def uniform(*shape: int, fan_in: int) -> torch.Tensor:
            values = (torch.rand(shape, generator=generator) * 2 - 1) / fan_in**0.5
            tensor: torch.Tensor = values.to(options.device).requires_grad_()
            return tensor

        self._hidden = uniform(num, width, hidden_size, fan_in=hidden_size)
        self._hidden_bias = uniform(num, width, fan_in=hidden_size)
        self._out = uniform(num, num_experts, width, fan_in=width)
        self._direct = uniform(num, num_experts, hidden_size, fan_in=hidden_size)
        self._bias = uniform(num, num_experts, fan_in=width)
        if options.plain:
            self._direct = torch.zeros_like(self._direct)
        self._parameters = [self._hidden, self._hidden_bias, self._out, self._direct, self._bias]
        self._is_expert = torch.zeros(num, num_experts, dtype=torch.bool)  # [M, E]
        for index, target in enumerate(targets):
            self._is_expert[index, : data.layers[target].num_experts] = True
        self._is_expert = self._is_expert.to(options.device)

    def train(self, training: Rows, validation: Rows) -> list[tuple[Mlp, int, float]]:
        """For each network: itself, its epochs, and its accuracy on `validation`."""
        data, options, source = self._data, self._options, self._source
        training, validation = (rows[data.ran[source, rows]] for rows in (training, validation))
        for target in self._targets:
            if not data.ran[target, training].any() or not data.ran[target, validation].any():
                raise TraceError(
                    f"field 'experts': no row to learn from, or none to stop by, ran layers {source} and {target}; "
                    "record more requests"
                )
        self._standardise(training)
        learned = [parameter for parameter in self._parameters if parameter.requires_grad]
        optimiser = torch.optim.AdamW(learned, lr=options.learning_rate, weight_decay=options.weight_decay, fused=True)
        num_batches = -(-len(training) // options.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.epochs * num_batches)
        dice = np.random.default_rng((options.seed, source))
        best = [(-1.0, 0)] * len(self._targets)  # accuracy, epoch
        kept = [parameter.detach().clone() for parameter in self._parameters]
        for epoch in range(1, options.epochs + 1):
            order = dice.permutation(training)
            for first in range(0, len(order), options.batch):
                optimiser.zero_grad()
                self._loss(np.sort(order[first : first + options.batch])).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
            for index, right in enumerate(self._accuracy(validation)):
                if right > best[index][0]:
                    best[index] = right, epoch
                    for held, parameter in zip(kept, self._parameters, strict=True):
                        held[index] = parameter.detach()[index]
            if epoch - max(last for _, last in best) >= options.patience:
                break
        arrays = [tensor.cpu().numpy() for tensor in kept]
        return [
            (self._mlp(index, target, arrays), best[index][1], best[index][0])
            for index, target in enumerate(self._targets)
        ]

    def _standardise(self, rows: Rows) -> None:
        """Mean and spread of each number of the router input, as the file holds them: rounded to 16 bits."""
        total = np.zeros(self._data.hidden_size)
        squares = np.zeros(self._data.hidden_size)
        for block in _blocks(rows):
            inputs = self._data.inputs(self._source, block).astype(np.float64)
            total += inputs.sum(axis=0)
            squares += np.square(inputs).sum(axis=0)
        mean = total / len(rows)
        spread = np.sqrt(np.maximum(squares / len(rows) - np.square(mean), 0))
        scale = np.where(spread > 0, 1 / np.maximum(spread, 1 / _MAX_SCALE), 0)
        self._mean, self._scale = mean.astype(np.float16), scale.astype(np.float16)

    def _inputs(self, rows: Rows) -> torch.Tensor:
        """[B, H]"""
        inputs = self._data.inputs(self._source, rows) - self._mean.astype(np.float32)
        return torch.from_numpy(inputs * self._scale.astype(np.float32)).to(self._options.device)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """[M, B, E]; those of experts that a layer does not have are far below all others."""
        hidden = torch.relu(torch.baddbmm(self._hidden_bias[:, None], self._all(inputs), self._hidden.mT))
        logits = torch.bmm(hidden, self._out.mT) + self._bias[:, None]
        if not self._options.plain:
            logits = logits + torch.bmm(self._all(inputs), self._direct.mT)
        return logits.masked_fill(~self._is_expert[:, None], -1e4)

    def _all(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.expand(len(self._targets), *inputs.shape)

    def _loss(self, rows: Rows) -> torch.Tensor:
        """Of the choices, binary cross-entropy; of the router's scores, where they are known, cross-entropy. Summed
        over the networks, of which each has its own parameters.
        """
        data, device = self._data, self._options.device
        logits = self._logits(self._inputs(rows))
        ran = torch.from_numpy(np.stack([data.ran[target, rows] for target in self._targets])).to(device)  # [M, B]
        chosen = torch.from_numpy(np.stack([self._chosen(target, rows) for target in self._targets])).to(device)
        of_choices = F.binary_cross_entropy_with_logits(logits, chosen, reduction="none").masked_fill(
            ~self._is_expert[:, None], 0
        )
        loss = _OF_CHOICES * of_choices.sum(-1) / self._is_expert.sum(-1)[:, None]
        if data.has_scores:
            scores = np.stack([self._padded(data.scores(target, rows)) for target in self._targets])
            loss = loss - (torch.from_numpy(scores).to(device) * logits.log_softmax(-1)).sum(-1)
        return (loss * ran).sum() / len(rows)

    def _chosen(self, target: int, rows: Rows) -> np.ndarray:
        chosen = needed(self._data.experts(target, rows), self._data.layers[target].num_experts)
        return self._padded(chosen.astype(np.float32))

    def _padded(self, values: np.ndarray) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, self._num_experts - values.shape[1])))

    @torch.no_grad()
    def _accuracy(self, rows: Rows) -> list[float]:
        """Of each network, the share of the experts it names that are needed."""
        right = np.zeros(len(self._targets))
        named = np.zeros(len(self._targets))
        for block in _blocks(rows):
            logits = self._logits(self._inputs(block)).cpu().numpy()
            for index, target in enumerate(self._targets):
                ran = self._data.ran[target, block]
                top_k = self._data.layers[target].top_k
                top = np.argsort(-logits[index][ran], axis=1, kind="stable")[:, :top_k]
                right[index] += np.take_along_axis(self._chosen(target, block)[ran], top, 1).sum()
                named[index] += top.size
        return [float(share) for share in right / named]

    def _mlp(self, index: int, target: int, arrays: Sequence[np.ndarray]) -> Mlp:
        num_experts = self._data.layers[target].num_experts
        hidden, hidden_bias, out, direct, bias = (array[index].astype(np.float16) for array in arrays)
        return Mlp(
            self._mean, self._scale, hidden, hidden_bias, out[:num_experts], direct[:num_experts], bias[:num_experts]
        )


def _blocks(rows: Rows) -> list[Rows]:
    return [rows[first : first + _BLOCK_ROWS] for first in range(0, len(rows), _BLOCK_ROWS)]


# -- from a trace to trained weights and what they are worth: who is trained on, who says when to stop, who judges -----

STOPPING = 10
"""One in so many of the requests that are learned from decides when training stops."""


@dataclass(frozen=True, slots=True)
class TrainingStudy:
    """The result. Accuracies are of decode tokens of the requests kept back, or of all tokens where none is decode."""

    trained: Trained
    accuracies: list[Accuracy]
    num_requests: dict[str, int]  # training, stopping, test
    num_rows: dict[str, int]  # training, stopping, test: those that accuracies are over

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "tokens": self.num_rows,
            "epochs": {f"{source}-{target}": num for (source, target), num in self.trained.epochs.items()},
            "mean": {str(distance): row for distance, row in means(self.accuracies).items()},
            "accuracy": [asdict(accuracy) for accuracy in self.accuracies],
        }


def study(
    trace: Trace, split: tuple[int, int], options: TrainOptions, progress: Progress | None = None
) -> TrainingStudy:
    """Train on the first part of the requests, as `simulate --split --seed` divides them, and measure accuracy on the
    rest. Raises ConfigError or TraceError where the trace lacks what training needs.
    """
    schedule = make_schedule(trace, Selection(split=split, seed=options.seed))
    num_stopping = max(1, len(schedule.training) // STOPPING)
    if num_stopping == len(schedule.training):
        raise ConfigError(f"split={split[0]}:{split[1]}: leaves one request to learn from; must be at least 2")
    parts = {
        "training": schedule.training[num_stopping:],
        "stopping": schedule.training[:num_stopping],
        "test": schedule.test,
    }
    num_rows = {name: sum(span.num_rows for span in spans) for name, spans in parts.items()}
    data = Dataset(trace, [*schedule.training, *schedule.test], progress)
    learned = np.arange(num_rows["stopping"] + num_rows["training"])
    trained = train(data, learned[num_rows["stopping"] :], learned[: num_rows["stopping"]], options, progress)
    judged, num_rows["test"] = accuracies(trace, data, schedule.training, schedule.test, trained.weights)
    num_requests = {name: len(spans) for name, spans in parts.items()}
    return TrainingStudy(trained, judged, num_requests, num_rows)
