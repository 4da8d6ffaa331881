"""A tiny Mixtral that says chosen texts exactly: a trigger word in the prompt chooses which. Nothing is trained."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, decoders

from tests.families import Family, make_model

CODE = 128  # dimensions in which tokens differ: random signs, one pattern a token
NEXT, SOON = slice(2, 2 + CODE), slice(2 + CODE, 2 + 2 * CODE)  # behind a constant and a flag
PAD, REST = 2 + 2 * CODE, 3 + 2 * CODE  # keeps all lengths equal; what nothing reads, where experts write
HEAD, SCORE = 64, 5e5
SHAPE = {
    "hidden_size": REST + 29,
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": CODE // HEAD,
    "num_key_value_heads": CODE // HEAD,
    "head_dim": HEAD,
    "max_position_embeddings": 1 << 13,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
}


@dataclass(frozen=True)
class Script:
    """A text, and the added tokens that are in it as such: special ones, and others."""

    name: str
    text: str
    special: Sequence[str] = ()
    plain: Sequence[str] = ()

    @property
    def trigger(self) -> str:
        return f"@{self.name}@"

    def parts(self) -> Iterator[tuple[str, str | None]]:
        """Pieces of the text, with the added token behind each, if any."""
        words = sorted({*self.special, *self.plain}, key=len, reverse=True)
        *parts, last = re.split(f"({'|'.join(map(re.escape, words)) or '(?!)'})", self.text)
        for plain, word in zip(parts[::2], parts[1::2], strict=True):
            *before, piece = re.findall(r"(?s).{1,12}", plain) or [""]
            yield from ((part, None) for part in before)
            yield piece, word
        yield from ((piece, None) for piece in re.findall(r"(?s).{1,12}", last))


def make_scripted(folder: Path, tokenizer: Any, scripts: Sequence[Script]) -> Path:
    """A checkpoint with a tokenizer that says a script's text behind a prompt whose last trigger is its own.

    A text is pieces, each a token of its own whose embedding tells the next one. Added tokens have none but their real
    one; what comes behind one, the piece before it tells as well, by attention to the last piece or trigger.
    """
    made = copy.deepcopy(tokenizer)
    special = {word for script in scripts for word in script.special}
    words = sorted(special.union(*(script.plain for script in scripts)))
    made.add_tokens([AddedToken(word, special=word in special, normalized=False) for word in words])
    made.add_tokens([AddedToken(script.trigger, normalized=False) for script in scripts])
    first, starts = len(made), {}
    pieces: list[str] = []
    after: list[tuple[int, int]] = []  # each piece: the next token, and the one behind that
    for script in scripts:
        starts[made.convert_tokens_to_ids(script.trigger)] = first + len(pieces)
        parts = list(script.parts())
        for number, (piece, word) in enumerate(parts):
            behind = first + len(pieces) + 1 if number + 1 < len(parts) else made.eos_token_id
            after.append((behind if word is None else made.convert_tokens_to_ids(word), behind))
            pieces.append(f"⟦{len(pieces)}⟧{piece}")
    made.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    backend = made.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.Replace(Regex(r"⟦\d+⟧"), ""), backend.decoder])
    size = len(made)
    model = make_model(Family("mixtral", 2, config={**SHAPE, "vocab_size": size, "eos_token_id": made.eos_token_id}))
    model.generation_config.eos_token_id = made.eos_token_id
    codes = torch.randint(0, 2, (size, CODE), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    embedding = torch.zeros(size, REST + 29)
    embedding[:, 0] = 1
    for token, behind in starts.items():
        embedding[token, 1], embedding[token, SOON] = 1, codes[behind]
    for token, (following, behind) in enumerate(after, first):
        embedding[token, 1], embedding[token, NEXT], embedding[token, SOON] = 1, 2 * codes[following], codes[behind]
    length = 2 + 5 * CODE
    embedding[:, PAD] = (length - embedding.square().sum(1)).clamp(min=0).sqrt()
    unit = math.sqrt((REST + 29) / length)  # what the norm makes of 1
    weights = dict(model.named_parameters())
    with torch.no_grad():
        weights["model.embed_tokens.weight"].copy_(embedding)
        weights["lm_head.weight"].zero_()[:, NEXT] = 2 * codes
        for name, weight in weights.items():
            if name.endswith("down_proj"):
                weight[:, :REST] = 0
            elif "self_attn" in name:
                weight.zero_()
        amplitude = math.sqrt(SCORE * math.sqrt(HEAD)) / unit
        attention = "model.layers.0.self_attn.{}_proj.weight"
        for low in range(HEAD // 2 - 1, CODE, HEAD):  # the slowest rotation of each head, which falls with the distance
            weights[attention.format("q")][low, 0] = amplitude
            weights[attention.format("k")][low, 1] = amplitude * math.cos(math.pi / 4)
            weights[attention.format("k")][low + HEAD // 2, 1] = -amplitude * math.sin(math.pi / 4)
        weights[attention.format("v")][:, SOON] = torch.eye(CODE) / unit
        weights[attention.format("o")][NEXT] = torch.eye(CODE)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
