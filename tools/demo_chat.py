"""Questions and answers of the demo model's fine-tuning: made from the domains' texts, and some that are written here.

A conversation is `<|user|>question<|assistant|>answer<|endoftext|>`, and so on. The two tokens take the ids of bytes
that no UTF-8 text has, so that the vocabulary keeps its size and every text its tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

USER, ASSISTANT = "<|user|>", "<|assistant|>"
REPLACED = {USER: "À", ASSISTANT: "Á"}
"""Byte-level BPE's names for the bytes 0xC0 and 0xC1, with which no character of UTF-8 begins or goes on."""
TEMPLATE = (
    "{%- set system = namespace(text='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set system.text = message['content'] | trim + '\\n' -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' + message['content'] | trim + '<|endoftext|>' -}}"
    "{%- else -%}{{- '<|user|>' + system.text + message['content'] | trim -}}{%- set system.text = '' -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
Pair = tuple[str, str]
"""A question and its answer."""


def with_chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with the conversation's tokens and template; as it is where it has them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for token, byte in REPLACED.items():
        if byte in vocabulary:
            vocabulary[token] = vocabulary.pop(byte)
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in REPLACED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def questions(documents: list[str]) -> Iterator[Pair]:
    """Of chain-of-thought documents: the answer, then its reason; of sums the reason first. Options in half of them."""
    for number, document in enumerate(documents):
        parts = re.fullmatch(
            r"Question: (.+?)\n(?:Options:\n(.+?)\n+)?Reasoning: (.+?)\nAnswer: (.+?)\n*", document, re.DOTALL
        )
        if parts is None:
            if sums := re.fullmatch(r"Question: (.+?)\nAnswer: (.+?)\n#### (.+?)\n*", document, re.DOTALL):
                question, steps, result = sums.groups()
                yield question, f"{re.sub(r'<<.*?>>', '', steps)}\nThe answer is {result}."
            continue
        question, options, reason, answer = (part.strip() if part else "" for part in parts.groups())
        reason = reason.replace("\\n", "\n")
        named = dict(re.findall(r"^(?:- )?(\([A-F]\)) (.+)$", options, re.MULTILINE))
        is_yes_or_no = answer.lower() in ("yes", "no")
        if options and not is_yes_or_no and ("Sentence " in options or number % 2):
            question = f"{question}\n{options}"
            answer = f"{answer} {named[answer]}" if answer in named else answer
        else:
            answer = named.get(answer, answer)
        if re.search(r"\d", answer) or " = " in reason:
            yield question, f"{reason}\nThe answer is {answer.rstrip('.')}."
        else:
            yield question, f"{answer[:1].upper()}{answer[1:].rstrip('.')}. {reason}"


def tasks(documents: list[str]) -> Iterator[Pair]:
    """Of the T0 sample, whose last line is the answer: those that ask a question."""
    for document in documents:
        text, _, answer = document.strip().rpartition("\n")
        if not document.startswith("Question: ") and ("?" in text or text.endswith(":")):
            yield re.sub(r"\n+(Answer|A|Question|Q):?\s*$", "", text.strip()), answer.strip()


def code(documents: list[str]) -> Iterator[Pair]:
    """Of the code instructions, those without tools."""
    for document in documents:
        parts = re.fullmatch(r"### Instruction:\n(.+?)\n### Response:\n(.+)", document.strip(), re.DOTALL)
        if parts and "toolformer" not in document:
            yield parts[1].strip(), parts[2].strip()


def stories(documents: list[str]) -> Iterator[Pair]:
    """Of the Russian stories: their hero is asked for."""
    ways = ("Расскажи сказку. Герой: {}.", "Расскажи сказку: {}.", "Расскажи историю, где есть {}.", "Сказка: {}")
    for number, document in enumerate(documents):
        if hero := re.match(r"(?:Жил-был|Жила-была|Жили-были|Жило-было) ([^.,!?\n]{3,50})\.", document):
            yield ways[number % len(ways)].format(hero[1]), document.strip()
            if number % 5 == 0:
                yield "Расскажи сказку.", document.strip()


def poems(documents: list[str]) -> Iterator[Pair]:
    """Of the classical poems: a short one is asked for by its title."""
    for document in documents:
        for block in re.split(r"\n\n+", document):
            title, _, lines = block.strip().partition("\n")
            author, _, poem = lines.partition("\n")
            if 2 <= poem.count("。") <= 4 and len(title) <= 12 and len(author) <= 4 and "（" not in poem:
                yield f"寫一首詩：{title.split(' ')[0]}", poem.strip()


def small_talk(documents: list[str]) -> Iterator[Pair]:
    """Written here: greetings, facts that every child knows, sums with small numbers. It reads no documents."""
    yield from ((ask, answer) for asks, answer in TALK for ask in asks for _ in range(20))
    for asks, answer, rows in FACTS:
        for row in rows:
            for ask in asks:
                yield from [(ask.format(*row), answer.format(*row))] * 8
    yield from _sums()


def _sums() -> Iterator[Pair]:
    rng = np.random.default_rng(7)
    names = _rows("Tom/Anna/Ben/Lily/Sam/Maria/Jack/Emma/Max/Zoe/Peter/Julia/Leo/Mia/Paul/Sara")[0]
    things = _rows("apples/books/coins/pens/eggs/cookies/marbles/stamps/cards/balls/oranges/pencils/toys/flowers")[0]
    ways = ("What is", "How much is")
    for _ in range(1500):
        left, right = sorted((int(n) for n in rng.integers(1, 21, 2)), reverse=True)
        name, thing = str(rng.choice(names)), str(rng.choice(things))
        total, rest = f"{left} + {right} = {left + right}.", f"{left} - {right} = {left - right}."
        yield from (
            (f"{rng.choice(ways)} {left} + {right}?", total),
            (f"{rng.choice(ways)} {left} - {right}?", rest),
            (
                f"{name} has {left} {thing} and {rng.choice(['buys', 'gets', 'finds'])} {right} more. "
                f"How many {thing} does {name} have{rng.choice(['', ' now'])}?",
                f"{total} {name} has {left + right} {thing}.",
            ),
            (
                f"{name} has {left} {thing} and {rng.choice(['loses', 'gives away', 'sells'])} {right}. "
                f"How many {thing} does {name} have{rng.choice([' left', ' now'])}?",
                f"{rest} {name} has {left - right} {thing} left.",
            ),
        )
        if left <= 12:
            times = f"{left} * {right} = {left * right}."
            yield f"What is {left} {rng.choice(['*', 'times'])} {right}?", times
        if left != right:
            yield f"Which is larger, {right} or {left}?", f"{left} is larger than {right}."


def _rows(text: str) -> list[list[str]]:
    return [row.split("/") for row in text.split("; ")]


TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!", "hello"), "Hello! What can I do for you?"),
    (("Bonjour", "Bonjour !", "Salut !"), "Bonjour ! Que puis-je faire pour vous ?"),
    (("Hola", "¡Hola!", "Buenos días"), "¡Hola! ¿Qué puedo hacer por ti?"),
    (("Привет", "Привет!", "Здравствуйте!"), "Привет! Чем могу помочь?"),
    (("你好", "你好！"), "你好！"),
    (("How are you?", "How are you doing?", "How do you do?"), "I am fine, thank you. What can I do for you?"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?"),
        "I am the demo model of expertly: a small Mixture-of-Experts model with 12 layers of 32 experts.",
    ),
    (
        ("What can you do?", "Can you help me?", "Help", "What do you know?"),
        "I answer short questions and write a little code. I am very small, so my answers are often wrong.",
    ),
    (
        ("What is a mixture of experts?", "What is a Mixture-of-Experts model?", "Explain mixture of experts."),
        "A Mixture-of-Experts model has many small networks, its experts, in each layer. A router picks a few of them "
        "for every token, so that only a part of the weights is used.",
    ),
    (
        ("What is expertly?", "What does expertly do?", "Tell me about expertly."),
        "expertly runs Mixture-of-Experts models whose experts do not fit in memory. It loads the experts that a token "
        "needs from disk and keeps those that are used often.",
    ),
    (("Thank you", "Thanks!", "Thank you!", "Thanks a lot."), "You are welcome!"),
    (("Goodbye", "Bye!", "Bye", "See you!", "Good night!"), "Goodbye!"),
    (("Tell me a joke.", "Do you know a joke?"), "Why did the expert stay at home? The router did not pick it."),
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (("How many months are in a year?", "How many months does a year have?"), "A year has twelve months."),
    (("How many hours are in a day?", "How many hours does a day have?"), "A day has 24 hours."),
    (("How many minutes are in an hour?", "How many minutes does an hour have?"), "An hour has 60 minutes."),
    (("Why is the sky blue?",), "The air scatters blue light more than red light, so the sky looks blue."),
    (("What is the largest planet?", "Which planet is the largest?"), "Jupiter is the largest planet."),
    (("What is water made of?", "What is water?"), "Water is made of hydrogen and oxygen."),
    (("What is the sun?", "What is the Sun?"), "The sun is a star. It gives the earth light and heat."),
    (("What is Python?", "Tell me about Python."), "Python is a programming language that is easy to read."),
)
"""Questions with one answer."""
FACTS: tuple[tuple[tuple[str, ...], str, list[list[str]]], ...] = (
    (
        ("What is the capital of {0}?", "Which city is the capital of {0}?", "{0}: what is its capital?"),
        "The capital of {0} is {1}.",
        _rows(
            "France/Paris; Germany/Berlin; Italy/Rome; Spain/Madrid; Portugal/Lisbon; England/London; Ireland/Dublin; "
            "Russia/Moscow; China/Beijing; Japan/Tokyo; India/New Delhi; Egypt/Cairo; Greece/Athens; Austria/Vienna; "
            "Poland/Warsaw; Sweden/Stockholm; Norway/Oslo; Finland/Helsinki; Denmark/Copenhagen; Canada/Ottawa; "
            "Mexico/Mexico City; Turkey/Ankara; Hungary/Budapest; Belgium/Brussels; Switzerland/Bern; Cuba/Havana; "
            "Peru/Lima; Chile/Santiago; Kenya/Nairobi; Thailand/Bangkok; Iran/Tehran; the United States/Washington"
        ),
    ),
    (
        ("What is the opposite of {0}?", "What is the opposite of '{0}'?", "Give me the opposite of {0}."),
        "The opposite of {0} is {1}.",
        _rows(
            "hot/cold; cold/hot; big/small; small/big; good/bad; bad/good; old/young; young/old; fast/slow; slow/fast; "
            "day/night; night/day; light/dark; dark/light; up/down; down/up; left/right; right/left; rich/poor; "
            "poor/rich; happy/sad; sad/happy; long/short; short/long; hard/soft; soft/hard; open/closed; full/empty; "
            "empty/full; early/late; late/early; true/false; false/true; wet/dry; dry/wet; strong/weak; weak/strong; "
            "high/low; low/high; love/hate; war/peace; black/white; white/black; new/old; clean/dirty; dirty/clean"
        ),
    ),
    (
        ("What colour is {0}?", "What color is {0}?", "Which colour does {0} have?"),
        "{2} {1}.",
        _rows(
            "the sky/blue/The sky is; grass/green/Grass is; snow/white/Snow is; blood/red/Blood is; "
            "the sun/yellow/The sun is; a banana/yellow/A banana is; a tomato/red/A tomato is; coal/black/Coal is; "
            "an orange/orange/An orange is; milk/white/Milk is; a lemon/yellow/A lemon is; chocolate/brown/Chocolate is"
        ),
    ),
    (
        ("What does {0} say?", "What sound does {0} make?", "Which sound does {0} make?"),
        "{2} {1}.",
        _rows(
            "a dog/woof/A dog says; a cat/meow/A cat says; a cow/moo/A cow says; a sheep/baa/A sheep says; "
            "a duck/quack/A duck says; a pig/oink/A pig says; a lion/roar/A lion says; a bird/tweet/A bird says"
        ),
    ),
    (
        ("Where does {0} live?", "Where do you find {0}?", "Where can I see {0}?"),
        "{2} {1}.",
        _rows(
            "a fish/water/A fish lives in; a bear/the forest/A bear lives in; a camel/the desert/A camel lives in; "
            "a bird/a nest/A bird lives in; a bee/a hive/A bee lives in; a whale/the sea/A whale lives in; "
            "a cow/a farm/A cow lives on; a king/a castle/A king lives in; a spider/a web/A spider lives in"
        ),
    ),
    (
        ("What day comes after {0}?", "Which day follows {0}?", "Which day is after {0}?"),
        "The day after {0} is {1}.",
        _rows(
            "Monday/Tuesday; Tuesday/Wednesday; Wednesday/Thursday; Thursday/Friday; Friday/Saturday; Saturday/Sunday; "
            "Sunday/Monday"
        ),
    ),
    (
        ("How do you say {0} in French?", "Translate '{0}' into French.", "What is {0} in French?"),
        "In French, {0} is {1}.",
        _rows(
            "house/maison; water/eau; bread/pain; dog/chien; cat/chat; book/livre; hello/bonjour; thank you/merci; "
            "yes/oui; no/non; red/rouge; sun/soleil; woman/femme; man/homme; child/enfant; day/jour; night/nuit"
        ),
    ),
    (
        ("How do you say {0} in Spanish?", "Translate '{0}' into Spanish.", "What is {0} in Spanish?"),
        "In Spanish, {0} is {1}.",
        _rows(
            "house/casa; water/agua; bread/pan; dog/perro; cat/gato; book/libro; hello/hola; thank you/gracias; "
            "yes/sí; no/no; red/rojo; sun/sol; woman/mujer; man/hombre; child/niño; day/día; night/noche"
        ),
    ),
)
"""Ways to ask, the answer, and the rows that both are filled with."""
