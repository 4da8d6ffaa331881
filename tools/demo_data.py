"""Text domains of the demo model: reading, tokenizer, token streams and batches.

Reads `<data>/text/*.txt.xz` (documents parted by a line `<|endoftext|>`), which is not part of this repository.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from demo_chat import ASSISTANT, USER, Pair, code, poems, questions, small_talk, stories, tasks, with_chat
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOT = "<|endoftext|>"
PIECES = r"[^\S\r\n]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Domain:
    """A text domain, its share of the training sequences, and what the model card says of it."""

    name: str
    file: str
    share: float
    source: str
    licence: str
    pairs: Callable[[list[str]], Iterator[Pair]] | None = None
    """What makes questions and answers of the file's documents; None: the text is learned as it is."""


DOMAINS = (
    Domain("books", "books_en", 0.25, "225 classic English books", "public domain texts"),
    Domain("instruct", "instruct_qa_en", 0.22, "FLAN chain of thought, GSM8K train, T0 sample", "Apache-2.0, MIT"),
    Domain("code", "code_instruct", 0.12, "GPTeacher code and tool instructions", "MIT"),
    Domain("es", "docs_es", 0.08, "Python documentation in Spanish", "CC0 contributions"),
    Domain("fr", "docs_fr", 0.07, "Python documentation in French", "CC0 contributions"),
    Domain("ru", "stories_ru", 0.13, "short stories in Russian", "Apache-2.0"),
    Domain("zh", "poetry_and_tech_zh", 0.13, "classical Chinese poetry; a machine-learning book", "MIT, Apache-2.0"),
)
CHAT = (
    Domain("questions", "instruct_qa_en", 0.28, "short questions of the instruct text", "Apache-2.0, MIT", questions),
    Domain("tasks", "instruct_qa_en", 0.06, "short tasks of the T0 sample", "Apache-2.0", tasks),
    Domain("programs", "code_instruct", 0.20, "short instructions of the code text", "MIT", code),
    Domain("small talk", "code_instruct", 0.34, "greetings, facts, sums written for it", "Apache-2.0", small_talk),
    Domain("tales", "stories_ru", 0.06, "the Russian stories, asked for by their hero", "Apache-2.0", stories),
    Domain("poems", "poetry_and_tech_zh", 0.06, "the Chinese poems, asked for by their title", "MIT", poems),
)
"""Conversations, of whose tokens only the answers' count."""
MAX_CONVERSATION = 300
"""Tokens: longer ones are left out. Of a batch's 256 they would leave little but a question."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams of one domain (uint16, documents ended by EOT)."""

    domain: Domain
    train: npt.NDArray[np.uint16]
    heldout: npt.NDArray[np.uint16]
    user: int
    """The token that begins a question, in conversations a place where a window may begin."""
    assistant: int

    def window(self, stream: npt.NDArray[np.uint16], start: int, length: int) -> npt.NDArray[np.int64]:
        """Token ids [length + 1] from `start` on; of conversations from the question at or before it."""
        if self.domain.pairs is not None:
            before = stream[max(0, start - MAX_CONVERSATION) : start + 1] == self.user
            start -= int(before[::-1].argmax())
        return stream[start : start + length + 1].astype(np.int64)

    def counted(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of a window's tokens [length + 1] count: all, or of conversations the answers, each with its end."""
        if self.domain.pairs is None:
            return np.ones(len(ids), dtype=bool)
        places = np.arange(len(ids))
        asked = np.maximum.accumulate(np.where(ids == self.user, places, -1))
        answered = np.maximum.accumulate(np.where(ids == self.assistant, places, -1))
        result: npt.NDArray[np.bool_] = (answered > asked) & (places > answered)
        return result


def read_documents(data: Path, domain: Domain, seed: int) -> tuple[list[str], list[str]]:
    """(training, held-out) documents, shuffled by seed; about 1 % and at least two documents are held out."""
    with lzma.open(data / "text" / f"{domain.file}.txt.xz", "rt", encoding="utf-8") as file:
        documents = [doc.strip("\n") for doc in file.read().split(EOT)]
    documents = [doc for doc in documents if doc.strip()]
    order = np.random.default_rng(seed).permutation(len(documents))
    shuffled = [documents[i] for i in order]
    num_heldout = max(2, len(shuffled) // 100)
    return shuffled[:-num_heldout], shuffled[-num_heldout:]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits stand alone; `<|endoftext|>` is id 0 and serves as bos, eos and pad."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOT,
        eos_token=EOT,
        pad_token=EOT,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def prepare(
    data: Path, cache: Path, seed: int, vocab_size: int, max_chars: int
) -> tuple[PreTrainedTokenizerFast, list[Corpus]]:
    """Tokenizer and token streams, from `cache` when it has them.

    A domain contributes at most `max_chars` characters to training, and 2 MB to the tokenizer's sample.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "done").exists():
        texts = {domain.name: read_documents(data, domain, seed) for domain in DOMAINS}
        tokenizer = with_chat(train_tokenizer(_sample(texts), vocab_size))
        tokenizer.save_pretrained(cache / "tokenizer")
        for name, (train, heldout) in texts.items():
            np.save(cache / f"{name}.train.npy", _encode(tokenizer, _capped(train, max_chars)))
            np.save(cache / f"{name}.heldout.npy", _encode(tokenizer, _capped(heldout, 400_000)))
        for domain in CHAT:
            for part, documents in zip(("train", "heldout"), read_documents(data, domain, seed), strict=True):
                conversations = _conversations(domain, documents, seed, part)
                np.save(cache / f"{domain.name}.{part}.npy", _encode(tokenizer, conversations))
        (cache / "done").touch()
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(cache / "tokenizer")
    tokens = [loaded.get_vocab()[token] for token in (USER, ASSISTANT)]
    corpora = [
        Corpus(d, *(np.load(cache / f"{d.name}.{part}.npy", mmap_mode="r") for part in ("train", "heldout")), *tokens)
        for d in (*DOMAINS, *CHAT)
    ]
    return loaded, corpora


def _conversations(domain: Domain, documents: list[str], seed: int, part: str) -> Iterator[str]:
    """Conversations in an order that the seed gives. Those that are written, not read, part by their hash."""
    assert domain.pairs is not None
    pairs = list(domain.pairs(documents))
    if domain.pairs is small_talk:
        pairs = [pair for pair in pairs if (crc32(pair[0].encode()) % 50 == 0) == (part == "heldout")]
    for number in np.random.default_rng(seed).permutation(len(pairs)):
        question, answer = pairs[number]
        if question and answer:
            yield f"{USER}{question}{ASSISTANT}{answer}"


def _sample(texts: dict[str, tuple[list[str], list[str]]], limit: int = 2_000_000) -> Iterator[str]:
    for train, _ in texts.values():
        taken = 0
        for doc in train:
            part = doc[: max(60_000, limit // 20)]
            taken += len(part.encode())
            yield part
            if taken > limit:
                break


def _capped(documents: list[str], max_chars: int) -> Iterator[str]:
    left = max_chars
    for doc in documents:
        if left <= 0:
            return
        yield doc[:left]
        left -= len(doc)


def _encode(tokenizer: PreTrainedTokenizerFast, documents: Iterator[str]) -> npt.NDArray[np.uint16]:
    """Documents as one stream, some at a time, so that they encode in parallel."""
    ids: list[int] = []
    user = tokenizer.convert_tokens_to_ids(USER)
    while some := list(islice(documents, 64)):
        for encoded in tokenizer.backend_tokenizer.encode_batch_fast(some, add_special_tokens=False):
            if encoded.ids[0] != user or len(encoded.ids) < MAX_CONVERSATION:
                ids += [*encoded.ids, tokenizer.eos_token_id]
    return np.asarray(ids, dtype=np.uint16)


class Sampler:
    """Seeded batches of windows; a row comes from one domain, and a window is not seen twice in an epoch."""

    def __init__(self, corpora: list[Corpus], seed: int, chat: float = 0.0) -> None:
        """`chat` is the share of rows that are conversations."""
        self._corpora = corpora
        self._rng = np.random.default_rng(seed)
        self._shares = np.array([c.domain.share * (chat if c.domain.pairs else 1 - chat) for c in corpora])
        self._shares /= self._shares.sum()
        self._queues: dict[tuple[int, int], list[int]] = {}

    def batch(self, num_rows: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Token ids [num_rows, length + 1] and which of them count as targets, alike."""
        domains = self._rng.choice(len(self._corpora), size=num_rows, p=self._shares)
        rows = [self._window(int(d), length) for d in domains]
        return np.stack(rows), np.stack([self._corpora[d].counted(row) for d, row in zip(domains, rows, strict=True)])

    def _window(self, domain: int, length: int) -> npt.NDArray[np.int64]:
        corpus = self._corpora[domain]
        queue = self._queues.setdefault((domain, length), [])
        if not queue:
            shift = int(self._rng.integers(0, length))
            num_windows = (len(corpus.train) - 1 - shift) // length
            queue += [int(i) * length + shift for i in self._rng.permutation(num_windows)]
        return corpus.window(corpus.train, queue.pop(), length)


def heldout_windows(corpus: Corpus, num_rows: int, length: int) -> npt.NDArray[np.int64]:
    """Evenly spaced held-out windows [n, length + 1], n <= num_rows."""
    num_windows = (len(corpus.heldout) - 1) // length
    picks = np.linspace(0, num_windows - 1, min(num_rows, num_windows)).astype(int)
    return np.stack([corpus.window(corpus.heldout, int(i) * length, length) for i in picks])
