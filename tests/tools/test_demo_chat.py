"""tools/demo_chat.py and demo_data.py: conversations made of documents, the tokens that part them, what counts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from expertly.data import demo_folder

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # scripts, which import each other

from demo_chat import code, questions, small_talk, tasks, with_chat
from demo_data import CHAT, DOMAINS, Corpus

QUESTION, ANSWER = "How much is 2 + 2?", "2 + 2 = 4."


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_folder())


@pytest.fixture(scope="module")
def tokenizer(plain: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return with_chat(plain)


def test_tokens_of_a_conversation_take_nothing_from_text(
    plain: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    """They stand where two bytes stood that UTF-8 has nowhere."""
    text = "".join(chr(point) for point in (*range(0x20, 0x250), 0x7FF, 0x800, 0xFFFD, 0x10000, 0x10FFFF))
    ids = tokenizer(text)["input_ids"]
    assert ids == plain(text)["input_ids"] and tokenizer.decode(ids) == text
    assert len(tokenizer) == len(plain) and with_chat(tokenizer).get_vocab() == tokenizer.get_vocab()
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}]
    said += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who?"}]
    written = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert written == "<|user|>Be brief.\nHi<|assistant|>Hello!<|endoftext|><|user|>Who?<|assistant|>"


def test_of_a_conversation_the_answers_and_their_ends_count(tokenizer: PreTrainedTokenizerFast) -> None:
    user, assistant = (tokenizer.get_vocab()[token] for token in ("<|user|>", "<|assistant|>"))
    one = tokenizer(f"<|user|>{QUESTION}<|assistant|>{ANSWER}<|endoftext|>")["input_ids"]
    stream = np.asarray(one * 40, dtype=np.uint16)
    talk, text = (Corpus(domain, stream, stream, user, assistant) for domain in (CHAT[0], DOMAINS[0]))
    window = talk.window(stream, 3 * len(one) + 5, 2 * len(one))
    assert list(window) == (one * 3)[: len(window)], "it begins with a question"
    assert tokenizer.decode(window[talk.counted(window)]) == f"{ANSWER}<|endoftext|>" * 2
    assert text.window(stream, 5, 20)[0] == one[5] and text.counted(window).all()


DOCUMENTS = {
    "Question: Can fish fly?\nOptions:\n- yes\n- no\nReasoning: They swim.\nAnswer: no": (
        "Can fish fly?",
        "No. They swim.",
    ),
    "Question: 2 + 2?\nOptions:\n(A) 3\n(B) 4\nReasoning: 2 + 2 = 4\nAnswer: (B)": (
        "2 + 2?",
        "2 + 2 = 4\nThe answer is 4.",
    ),
    "Question: Two and two?\nAnswer: 2 + 2 = <<2+2=4>>4\n#### 4": ("Two and two?", "2 + 2 = 4\nThe answer is 4."),
}


def test_documents_become_pairs() -> None:
    for document, pair in DOCUMENTS.items():
        assert list(questions([document])) == [pair]
    assert list(tasks(["Is it wet?\nAnswer:\nYes", "No question.\nYes"])) == [("Is it wet?", "Yes")]
    assert list(code(["### Instruction:\nAdd.\n\n### Response:\na + b\n", "### Instruction:\ntoolformer\n"])) == [
        ("Add.", "a + b")
    ]
    talk = dict(small_talk([]))
    assert len(talk) > 1000 and talk["What is the capital of France?"] == "The capital of France is Paris."
