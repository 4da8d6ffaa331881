"""A model that nobody trained: what an encoder-decoder routes, where no trained one is at hand."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from expertly.model.structure import SWITCH

VOCABULARY = 512


def write_switch(folder: Path, seed: int, num_experts: int = 16) -> None:
    """A checkpoint of a small Switch Transformer with random weights: four MoE layers in the encoder, four in the
    decoder. It answers without an end.
    """
    config = AutoConfig.for_model(
        SWITCH,
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_heads=4,
        num_experts=num_experts,
        num_layers=8,
        num_decoder_layers=8,
        num_sparse_encoder_layers=4,
        num_sparse_decoder_layers=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
