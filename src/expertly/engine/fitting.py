"""What of a model fits in this machine's memory, before it is downloaded; and which quantisation of one does."""

from __future__ import annotations

import logging
import os

from expertly.core.errors import CheckpointError
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.core.units import format_nbytes, format_share
from expertly.engine.device import choose_device, kind_of
from expertly.engine.memory import DEFAULT_CONTEXT, beside_layers
from expertly.engine.process import rss_nbytes
from expertly.model.hub import HubModel, split_name
from expertly.model.needs import ModelNeeds, needs_of
from expertly.model.packing import local_folder, store_alone
from expertly.model.quantisations import Quantisation, quantisations
from expertly.scheduler.budget import least_nbytes
from expertly.store.manifest import ITEMSIZE


def left_for_experts(needs: ModelNeeds, memory_nbytes: int, *, runs_on_host: bool) -> int:
    """What of so much memory the rest of the model and 4096 tokens leave; below 0 where they do not fit."""
    dense, taken = (needs.dense_nbytes, rss_nbytes()) if runs_on_host else (needs.decoded_dense_nbytes, 0)
    beside = beside_layers(needs.layers, needs.config, dense, ITEMSIZE[needs.dtype], runs_on_host=runs_on_host)
    return memory_nbytes - taken - dense - beside.fixed_nbytes - beside.of_tokens(0, DEFAULT_CONTEXT)


def with_quantisation(
    model: str | None, device: str | None = None, total_memory: str | int | None = None
) -> str | None:
    """`model`, and where that is a repository of GGUF files with no quantisation behind its name, the one for this
    machine: of those that were downloaded before, or else of all, the largest whose experts are all in memory, or else
    the smallest that runs. A line says which. The store of one whose download is gone comes before them.

    `device`, `total_memory`: see `expertly.load`. Raises CheckpointError where none is of a model that runs,
    ConfigError for an option.
    """
    if model is None:
        return None
    hub = _quantised_on_hub(model)
    if hub is None:
        return model
    usable = [quantisation for quantisation in quantisations(hub.ggufs) if not quantisation.problem]
    if not usable:
        return model
    if (store := store_alone(model)) is not None:
        return str(store)
    target = choose_device(device)
    free = kind_of(target).available_nbytes(target)
    memory = free if total_memory is None else parse_memory(total_memory, free, "total_memory") or free
    candidates = [quantisation for quantisation in usable if hub.has(quantisation.files)] or usable
    chosen, share = _fitting(model, candidates, memory, runs_on_host=kind_of(target).runs_on_host)
    part = "" if share >= 1 else f", {format_share(share)} of its experts in memory"
    logging.getLogger("expertly").warning(
        "%s: chose %s (%s%s) of %s; name another with :TAG",
        model,
        chosen.name,
        format_nbytes(chosen.nbytes),
        part,
        ", ".join(quantisation.name for quantisation in usable),
    )
    return f"{model}:{chosen.name}"


def _quantised_on_hub(model: str) -> HubModel | None:
    """The repository of GGUF files that a model is, with no quantisation named; None where it is another or here."""
    if os.path.exists(os.path.expanduser(model)) or local_folder(model) or split_name(model)[1]:
        return None
    try:
        kept = HubModel.cached(split_name(model)[0])
        if kept is not None and kept.has_safetensors:
            return None  # without asking the hub
        hub = HubModel.look_up(model)
    except CheckpointError:  # a store of it may be here
        return None
    return hub if hub.is_quantised else None


def _fitting(model: str, usable: list[Quantisation], memory: int, *, runs_on_host: bool) -> tuple[Quantisation, float]:
    """The quantisation of those that `with_quantisation` takes, and the share of its experts that fits."""
    problem: CheckpointError | None = None

    def share(quantisation: Quantisation) -> float | None:
        nonlocal problem
        try:
            needs = needs_of(f"{model}:{quantisation.name}")
        except CheckpointError as error:  # of types that do not run, or no model
            problem = problem or error
            return None
        left = left_for_experts(needs, memory, runs_on_host=runs_on_host)
        return left / needs.experts_nbytes if left >= least_nbytes(Geometry(needs.layers)) else 0.0

    for quantisation in reversed(usable):
        if quantisation.nbytes <= memory and (share(quantisation) or 0.0) >= 1:
            return quantisation, 1.0
    for quantisation in usable:
        if (part := share(quantisation)) is not None:
            return quantisation, part
    assert problem is not None
    raise problem
