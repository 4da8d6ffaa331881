"""Systems of other authors that papers compare with, and bounds: the entry points of `expertly.systems`."""

from __future__ import annotations

from expertly.policies.prediction import ALL_LAYERS
from expertly.scheduler.systems import System

BOUNDS = ("belady", "belady-global", "oracle", "resident")
"""Simulated beside the systems that are compared: bounds, and every expert kept."""

RANDOM = System("random", "evicts at random: the baseline every policy must beat", eviction="random", scope="layer")
DEEPSPEED_INDEX = System(
    "deepspeed-index",
    "prefetches the next layer's experts in the order of their numbers (DeepSpeed, as MoE-Infinity has it)",
    eviction="lru",
    scope="global",
    prediction="index",
    prefill="evict",
)
BRAINSTORM = System(
    "brainstorm",
    "predicts and evicts by how often experts were chosen so far (BrainStorm, as MoE-Infinity has it)",
    eviction="lfu",
    scope="global",
    prediction="popularity",
    prefill="evict",
)
MIXTRAL_OFFLOADING = System(
    "mixtral-offloading",
    "LRU per layer; each layer waits for what the next one's router, asked early, makes it load",
    eviction="lru",
    scope="layer",
    prediction="lookahead",
    prefill="evict",
    loop="synchronous",
)
MOE_INFINITY_LFU = System(
    "moe-infinity-lfu",
    "prefetches what each request chose most so far, and waits for it (MoE-Infinity, as fMoE and MoEpic have it)",
    eviction="lfu",
    scope="global",
    prediction="counts",
    prefill="evict",
    loop="synchronous",
)
# What the authors' artifact of fMoE queues, whose transfers nothing waits for (finemoe_artifact.py).
MIXTRAL_OFFLOADING_ARTIFACT = System(
    "mixtral-offloading-artifact",
    "prefetches the ids that a layer chose for the next nine layers (Mixtral-Offloading, as fMoE's artifact runs it)",
    eviction="lru",
    scope="layer",
    prediction="same-ids",
    distance=9,
    prefill="evict",
)
PROMOE_ARTIFACT = System(
    "promoe-artifact",
    "asks the routers 2, 4 and 6 layers ahead early (ProMoE, as fMoE's artifact runs it)",
    eviction="lfu",
    scope="global",
    prediction="stride",
    distance=6,
    prefill="evict",
)
MOE_INFINITY_ARTIFACT = System(
    "moe-infinity-artifact",
    "queues all experts of half the layers, the nearest matrix' first (MoE-Infinity, as fMoE's artifact runs it)",
    eviction="lfu",
    scope="global",
    prediction="eam-artifact",
    distance=3,
    prefill="evict",
    options=(("capacity", "1000"), ("matches", "1")),
)
FMOE_ARTIFACT = System(
    "fmoe-artifact",
    "fMoE as its artifact runs it: of prompts only the first layers are predicted",
    eviction="fmoe",
    scope="global",
    prediction="fmoe-artifact",
    distance=3,
    prefetch="proximity",
    prefill="evict",
)
MODELLED_LOOKAHEAD = System(
    "modelled-lookahead",
    "LRU per layer with a lookahead of stated accuracy, modelled (ProMoE, section 4: 90.5% one layer ahead)",
    eviction="lru",
    scope="layer",
    prediction="modelled",
)
# Layers that keep nothing are prefetched, too: into staging slots.
ADAPMOE = System(
    "adapmoe",
    "LRU per layer with a lookahead; layers that miss more keep more, by dynamic programming (AdapMoE)",
    eviction="lru",
    scope="layer",
    allocation="adapmoe",
    prediction="lookahead",
    ahead="staging",
    prefill="evict",
)
PRE_GATED = System(
    "pre-gated",
    "keeps nothing: a trained predictor prefetches one layer ahead (Pre-gated MoE, but lossless)",
    eviction="lru",
    scope="layer",
    allocation="none",
    prediction="learned",
    ahead="staging",
)
BELADY = System(
    "belady",
    "keeps what is used again soonest: no replacement within layers loads less",
    eviction="belady",
    scope="layer",
    admission="best",
)
BELADY_GLOBAL = System(
    "belady-global",
    "the same in one cache over all layers: no system loads fewer bytes",
    eviction="belady",
    scope="global",
    admission="best",
)
ORACLE = System(
    "oracle",
    "belady-global with perfect prediction, prefetching as early as slots and the link allow",
    eviction="belady",
    scope="global",
    prediction="perfect",
    distance=ALL_LAYERS,
    admission="best",
    ahead="staging",
)
