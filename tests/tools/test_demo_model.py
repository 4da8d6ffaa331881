"""The demo model that ships with the package: what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from expertly.data import demo_folder

DEMO = demo_folder()
TEXTS = {
    "English": "The captain walked along the shore in the evening, and the wind that came from the sea was cold. "
    "He had not spoken to any of the men since the morning, and they did not speak to him.",
    "Question": "Question: There are 15 trees in the grove. Workers will plant 6 more trees today. How many trees are "
    "there?\nReasoning: There are 15 trees. 15 + 6 = 21.\nAnswer: 21",
    "code": "def count(items):\n    result = {}\n    for item in items:\n"
    "        result[item] = result.get(item, 0) + 1\n    return result\n",
    "Spanish": "Este módulo proporciona una clase para leer archivos. Si el archivo no existe, se lanza una excepción.",
    "French": "Cette fonction renvoie une liste des éléments. Si l'argument est omis, une valeur par défaut sert.",
    "Russian": "Жила-была маленькая девочка. Однажды она пошла в лес и увидела там большого медведя. Она испугалась.",
    "Chinese": "春眠不覺曉，處處聞啼鳥。夜來風雨聲，花落知多少。我们使用训练数据集来训练模型参数。",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def test_has_the_shape_of_a_real_one_and_is_small() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 48_000_000
    config = transformers.AutoConfig.from_pretrained(DEMO)
    assert config.num_hidden_layers >= 12 and not config.mlp_only_layers
    assert config.num_experts >= 32
    assert config.num_experts_per_tok >= 4
    assert config.dtype == torch.bfloat16
    assert transformers.GenerationConfig.from_pretrained(DEMO).do_sample, "greedily, so small a model repeats itself"


@pytest.mark.parametrize("language", TEXTS)
def test_tokenizer_gives_text_back(tokenizer: Any, language: str) -> None:
    ids = tokenizer(TEXTS[language])["input_ids"]
    assert tokenizer.decode(ids) == TEXTS[language]
    assert len(ids) < 0.75 * len(TEXTS[language].encode())
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id] == [tokenizer.pad_token_id]


def test_predicts_much_better_than_chance_and_domains_differ(tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    loads = []
    for text in TEXTS.values():
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model(ids, labels=ids, output_router_logits=True)
        assert float(output.loss) < 7.0  # a uniform guess has 9.01
        loads.append(expert_load(output.router_logits, model.config.num_experts_per_tok))
    load = torch.stack(loads)  # [D, L, E]
    total = load.mean(0)
    assert int((total == 0).sum()) <= 0.02 * total.numel()  # these texts have only a few hundred tokens
    assert float(total.max()) < 0.25
    assert float((load[:, None] - load[None]).abs().sum(-1).mean() / 2) > 0.2


def expert_load(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Share of each layer's assignments that each expert gets, [L, E]."""
    logits = torch.stack([layer.float() for layer in router_logits])  # [L, T, E]
    chosen = logits.topk(top_k, dim=-1).indices.flatten(1)
    return torch.nn.functional.one_hot(chosen, logits.shape[-1]).float().mean(1)
