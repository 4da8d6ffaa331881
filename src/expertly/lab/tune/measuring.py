"""A machine and a model on it, in the simulator's terms, as `expertly doctor MODEL --hardware-out` measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from expertly import api
from expertly.core.errors import ConfigError, ModelUseError
from expertly.engine.device import kind_of
from expertly.hardware.measure import store_costs
from expertly.lab.fit_decoding import fit_decoding
from expertly.lab.model_profile import ModelProfile, measure_model
from expertly.sim.hardware import Hardware
from expertly.store.packed import PackedStore

TOKENS = (1, 64)
"""Of passes that are measured: steps and a prompt. Others take times in between, and beyond."""


def measure_hardware(
    model: Any,
    other: Callable[[], Any],
    stores: Mapping[str, PackedStore],
    seconds: float,
    machine: Callable[[], Hardware],
) -> tuple[Hardware, str]:
    """The machine that `model` is loaded on, and where its times are from, in words; takes about `seconds`, and one
    round of everything at least. `other` loads the model in memory that its times can be measured in, where they cannot
    in this one's. `stores`: of the model, by codec. `machine` measures the machine alone: it is asked for what lies
    behind an accelerator, and where the model's own times cannot be measured at all.
    """
    is_hosted = not kind_of(model.device).runs_on_host
    hardware = machine() if is_hosted else Hardware.read("infinite")
    about = "the times of this model's layers, experts and loads, measured here"
    disk, costs = store_costs(stores["planes"]) if "planes" in stores else (None, hardware.codec)
    try:
        measured = _measured(model, other, seconds)
    except (ConfigError, ModelUseError) as error:
        hardware = hardware if is_hosted else machine()
        about = f"the rates of this machine, as the model's own times cannot be measured: {error}"
    else:
        hardware = hardware.with_model(measured.link, measured.compute)
        if disk is not None and api.handle(model).store.codec != "none":  # how long its spans took has decoding in it
            hardware = hardware.with_disk(disk)
            if not is_hosted and costs is not None:
                geometry = stores["planes"].geometry(1)
                costs = fit_decoding(measured.layers, disk, costs, measured.compute, geometry)
    return replace(hardware, name="this machine", codec=costs), about


def _measured(model: Any, other: Callable[[], Any], seconds: float) -> ModelProfile:
    """Where all experts or hardly any stay in memory, with others that do."""
    try:
        return measure_model(model, seconds, TOKENS)
    except ConfigError:
        beside = other()
        try:
            return measure_model(beside, seconds, TOKENS)
        finally:
            api.unload(beside)
