"""What a ReuseModel learns from routing, what of it is kept, and the eviction `reuse` that goes by it."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from ctypes import PyDLL
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.policies.eviction import EVICTIONS, reuse
from expertly.policies.eviction.reuse import (
    BATCH,
    CARRIED,
    DISCOUNT,
    HORIZON,
    KNOWN,
    MEAN_RATE,
    NEAR_DISCOUNT,
    OWN_WEIGHT,
    RATE,
    REACH,
    SHARPNESS,
    WEIGHED,
    LayerReuse,
    Reuse,
    ReuseModel,
    compiled_reuse,
    num_weights,
    state_of,
)
from tests.scheduler.drive import geometry, one_token, run_layer, scheduler
from tests.tables import seeds

LAYERS, EXPERTS = 3, 16


SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)


SOURCE = Path(reuse.__file__).with_name("reuse.c")
COMPILERS = {"fastest": "gcc -O3", "plain": "gcc -O1 -DFASTEST="}
"""The second keeps to the instructions that every processor has."""


def compile_into(folder: Path, text: str, compiler: str = COMPILERS["plain"]) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    folder.mkdir(exist_ok=True)
    (folder / "reuse.c").write_text(text)
    words = *compiler.split(), "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC"
    subprocess.run([*words, "-o", folder / "_reuse.so", folder / "reuse.c"], check=True)
    return folder


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PyDLL | None]:
    """What computes, and None for NumPy."""
    found: dict[str, PyDLL | None] = {"numpy": None}
    for name, compiler in COMPILERS.items():
        found[name] = compiled_reuse(compile_into(tmp_path_factory.mktemp(name), SOURCE.read_text(), compiler))
        assert found[name] is not None
    return found


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "compiled_reuse", lambda: None)


class Reference:
    """The model as docs/systems/expertly.md explains it, in float64, step by step. Layers are of one size."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.recent = np.zeros((num_layers, num_experts))
        self.mean = np.zeros((num_layers, num_experts))
        self.seen = [range(max(0, layer - REACH), min(num_layers, layer + REACH + 1)) for layer in range(num_layers)]
        self.weights = [np.zeros((num_experts, len(seen), num_experts)) for seen in self.seen]
        for layer, (weights, seen) in enumerate(zip(self.weights, self.seen, strict=True)):
            for expert in range(num_experts):
                weights[expert, seen.index(layer), expert] = OWN_WEIGHT
        self.base = np.zeros((num_layers, num_experts))
        self.steps: list[list[tuple[np.ndarray, np.ndarray, np.ndarray, set[int], list[Any]]]] = [
            [] for _ in range(num_layers)
        ]
        self.tokens = [0] * num_layers
        self.past = PastReference(num_layers, num_experts)
        self.similar = SimilarReference(num_layers, num_experts)

    def observe(self, router: RouterRan) -> np.ndarray:
        """The value of each expert of the layer."""
        layer, num = router.layer, router.batch_tokens
        if len(self.steps[layer]) == BATCH + HORIZON:
            self._learn(layer)
        left = np.exp(-num / 2)
        share = np.zeros(self.recent.shape[1])
        for expert, tokens in zip(router.experts, router.num_tokens, strict=True):
            share[expert] = tokens / num
        self.recent[layer] = left * self.recent[layer] + (1 - left) * share
        if not router.serves_decode:
            self.steps[layer].clear()
            self._follow(layer, self.recent[layer], num)
        inputs = self.recent[list(self.seen[layer])].copy()
        values = np.einsum("elf,lf->e", self.weights[layer], inputs) + self.base[layer]
        used = {e for e, tokens in zip(router.experts, router.num_tokens, strict=True) if tokens}
        classes = self.past.classes(layer, used, num, None if router.serves_decode else self.recent[layer])
        similar = self.similar.values(layer, used) if router.serves_decode else self.similar.prompt()
        self.steps[layer].append((inputs, values, similar, used, classes))
        self.tokens[layer] += num
        return self.past.worth(classes, values, similar)

    def _learn(self, layer: int) -> None:
        steps, change = self.steps[layer], np.zeros_like(self.weights[layer])
        self.past.learn(layer, [step[1:] for step in steps])
        for now in range(BATCH):
            inputs, values, *_ = steps[now]
            centred = inputs - self.mean[list(self.seen[layer])]
            known = 1 - DISCOUNT**HORIZON
            for expert in range(len(values)):
                later = [DISCOUNT ** (k - 1) for k in range(1, HORIZON + 1) if expert in steps[now + k][3]]
                error = sum(later) / known - values[expert]
                change[expert] += RATE * error * centred / (1e-3 + (centred**2).sum())
        self.weights[layer] += change
        own = self.seen[layer].index(layer)
        self._follow(layer, np.mean([steps[now][0][own] for now in range(BATCH)], axis=0), BATCH)
        del steps[:BATCH]

    def _follow(self, layer: int, recent: np.ndarray, num: int) -> None:
        rate = max(1 - (1 - MEAN_RATE) ** num, num / max(num, self.tokens[layer]))
        self.mean[layer] += rate * (recent - self.mean[layer])
        mean = self.mean[list(self.seen[layer])]
        at_mean = np.einsum("elf,lf->e", self.weights[layer], mean)
        self.base[layer] = self.mean[layer] / (1 - DISCOUNT) - at_mean


class SimilarReference:
    """What followed similar steps: SimilarSteps, in float64, step by step."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.steps: list[dict[int, set[int]]] = [{}]  # layer -> experts
        self.is_whole = [False]  # eight steps followed
        self.alike = np.zeros(1)
        self.num = 0
        self.running = num_layers

    def prompt(self) -> np.ndarray:
        self.num, self.running, self.alike = 0, self.num_layers, 0 * self.alike
        return np.zeros(self.num_experts)

    def values(self, layer: int, used: set[int]) -> np.ndarray:
        if layer <= self.running:
            self.num += 1
            self.steps.append({})
            self.is_whole.append(False)
            if self.num > HORIZON:
                self.is_whole[-1 - HORIZON] = True
            self.alike = np.array([0, *(self.alike * CARRIED)])
        self.running = layer
        for at, step in enumerate(self.steps[:-1]):
            self.alike[at] += SHARPNESS / self.num_layers * len(step.get(layer, set()) & used) / len(used)
        self.steps[-1][layer] = used
        found, total = np.zeros(self.num_experts), 0.0
        for at in range(max(0, len(self.steps) - reuse.STEPS), len(self.steps)):
            if self.is_whole[at]:
                likeness = np.exp(self.alike[at] - max(self.alike))
                total += likeness
                for k in range(1, HORIZON + 1):
                    worth = NEAR_DISCOUNT ** (k - 1) / (1 - NEAR_DISCOUNT**HORIZON)
                    found[list(self.steps[at + k].get(layer, set()))] += likeness * worth
        return found / total if total else found


class PastReference:
    """What experts' own past says, and how much each prediction weighs: OwnPast, in float64, expert by expert."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.age = np.full((num_layers, num_experts), 10**6)
        self.served = np.zeros((num_layers, num_experts), np.float32)  # as there: which class it is hangs on rounding
        self.num_served = np.ones(num_layers, np.float32)
        self.rate = np.zeros((num_layers, num_experts), int)  # seen last when the layer learned
        self.seen: dict[tuple[int, int], Any] = {}  # (age, rate), as classes -> [sum of worths, number]
        self.products = np.zeros((3, 4))
        self.weights = np.array([0.3, 0.0, 0.5])  # of the model, similar steps and own past

    def classes(self, layer: int, used: set[int], num: int, shares: np.ndarray | None) -> list[tuple[int, int]]:
        self.age[layer] += 1
        self.age[layer][list(used)] = 0
        if shares is None:
            self.served[layer][list(used)] += 1
            self.num_served[layer] += 1
        else:
            for expert in used:
                self.age[layer][expert] = min(num, round(1 / shares[expert]))
            self.served[layer] += np.float32(num) * shares.astype(np.float32)
            self.num_served[layer] += num
            self._rate(layer)
        return [*zip(map(self._age_class, self.age[layer]), self.rate[layer].tolist(), strict=True)]

    def worth(self, classes: list[tuple[int, int]], values: np.ndarray, similar: np.ndarray) -> np.ndarray:
        return self.weights @ np.stack([values, similar, [self._said(one) for one in classes]])

    def learn(self, layer: int, steps: list[tuple[np.ndarray, np.ndarray, set[int], list[tuple[int, int]]]]) -> None:
        """Four steps, and the eight after them."""
        self.products *= np.exp(-BATCH / (WEIGHED * self.num_layers))
        needed = []
        for now, (values, similar, _, classes) in enumerate(steps[:BATCH]):
            known = 1 - NEAR_DISCOUNT**HORIZON
            later = [(NEAR_DISCOUNT ** (k - 1) / known, steps[now + k][2]) for k in range(1, HORIZON + 1)]
            needed.append([sum(worth for worth, used in later if expert in used) for expert in range(len(values))])
            said = np.stack([values, similar, [self._said(one) for one in classes]])
            self.products += said @ np.stack([*said, needed[-1]]).T
        squares = self.products[:, :3] + 5 * np.eye(3)
        self.weights = np.linalg.solve(squares, self.products[:, 3] + [5 * 0.3, 0, 5 * 0.5])
        for one in self.seen.values():
            one *= np.exp(-BATCH / (KNOWN * self.num_layers))
        for (*_, classes), worths in zip(steps, needed, strict=False):
            for one, worth in zip(classes, worths, strict=True):
                self.seen[one] = self.seen.get(one, np.zeros(2)) + np.array([worth, 1])
        self.served[layer] *= np.float32((1 - MEAN_RATE) ** BATCH)
        self.num_served[layer] *= np.float32((1 - MEAN_RATE) ** BATCH)
        self._rate(layer)

    def _rate(self, layer: int) -> None:
        for expert, served in enumerate(self.served[layer]):
            share = served / self.num_served[layer]
            self.rate[layer, expert] = 0 if share <= 2**-13 else min(25, int(2 * (np.log2(share) + 13)))

    def _age_class(self, age: int) -> int:
        """0 to 8 by themselves, then four classes an octave; one of all beyond 1792."""
        edges = [*range(9), *(num << octave for octave in range(8) for num in (10, 12, 14, 16))][:-1]
        return sum(age > edge for edge in edges)

    def _said(self, one: tuple[int, int]) -> float:
        age, rate = one
        edges = [*range(9), *(num << octave for octave in range(8) for num in (10, 12, 14, 16))][:-1]
        steps = edges[age] if age < len(edges) else 2 * edges[-1]
        first = min(1.0, 0.75 / (1 + steps) + 1.5 * 2 ** (rate / 2 - 13))
        total, num = self.seen.get(one, (0.0, 0.0))
        return (total + 4 * first) / (num + 4)


def prompt(layer: int, dice: random.Random, tokens: int = 40) -> RouterRan:
    counts = [dice.randint(1, 9) for _ in range(EXPERTS)]
    return RouterRan(layer, list(range(EXPERTS)), counts, [False] * EXPERTS, tokens)


def values(model: ReuseModel, layer: int, shape: Geometry = SHAPE) -> np.ndarray:
    """What the experts of the layer that ran last are worth, a step from now."""
    first = shape.first_expert_id(layer)
    return model.worth()[first : first + shape.layers[layer].num_experts]


def told_by_another(num_steps: int, seed: int) -> list[list[list[int]]]:
    """[step][layer][2 experts]. Layer 0 chooses at random and layer 1 at random, too; but what layer 1 needs in the
    next step is what layer 0 chose in this: nothing that layer 1 did says it.
    """
    dice = random.Random(seed)
    chosen, steps = [0, 1], []
    for _ in range(num_steps):
        last, chosen = chosen, dice.sample(range(EXPERTS), 2)
        steps.append([chosen, last, dice.sample(range(EXPERTS), 2)])
    return steps


def ranks(model: ReuseModel, steps: list[list[list[int]]]) -> list[float]:
    """Of what layer 1 needs in the next step: its rank among the values of layer 1 now, 1 the highest, 0 the lowest."""
    found = []
    for now, step in enumerate(steps[:-1]):
        for layer, experts in enumerate(step):
            model.observe(one_token(layer, experts))
            if layer == 1:
                rank = values(model, layer).argsort().argsort() / (EXPERTS - 1)
                found += [rank[expert] for expert in steps[now + 1][1]]
    return found


@cache
def _taught() -> tuple[ReuseModel, list[float]]:
    model = ReuseModel(SHAPE)
    return model, ranks(model, told_by_another(1500, 0))


def taught() -> ReuseModel:
    """One that goes on from what 1499 tokens taught of what layer 1 needs."""
    model = ReuseModel(SHAPE)
    model.restore(state_of(_taught()[0]))
    return model


def test_it_learns_from_the_choices_of_an_earlier_layer() -> None:
    found = _taught()[1]
    assert np.mean(found[:100]) < 0.6, "nobody knows it at the start"
    assert np.mean(found[-600:]) > 0.88


def test_values_are_those_of_the_formulas(monkeypatch: pytest.MonkeyPatch, in_numpy: None) -> None:
    """In lock-step with the reference over decode and prompts, with an expert that several tokens chose, and more steps
    than are compared with the running one.
    """
    monkeypatch.setattr(reuse, "STEPS", 60)
    dice, model, reference = random.Random(3), ReuseModel(SHAPE), Reference(LAYERS, EXPERTS)
    for step in range(200):
        for layer in range(LAYERS):
            if step % 90 == 0:
                router = prompt(layer, dice)
            elif step % 7:
                router = one_token(layer, dice.sample(range(4 + step % 3), 2))
            else:
                router = RouterRan(layer, [3, 9, 4], [2, 1, 0], [True, True, False], 2)
            model.observe(router)
            expected = reference.observe(router)
            first = SHAPE.first_expert_id(layer)
            np.testing.assert_allclose(model._values[first : first + EXPERTS], expected, atol=2e-3)


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_compiled_it_computes_the_same(
    seed: int, libraries: dict[str, PyDLL | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in NumPy to within rounding, and to the bit with any instruction set. Layers of several sizes decode batches
    of one and more with pads among them; there are prompts, more steps than are compared with the running one, layers
    that a step leaves out, and in the middle all go on from what one of them learned.
    """
    monkeypatch.setattr(reuse, "STEPS", 60)
    sizes = (16, 5, 70, 130, 24, 64)
    shape = Geometry(tuple(LayerGeometry(num, 1, 4, 16, 3, 2) for num in sizes))
    dice, models = random.Random(seed), {}
    for name, library in libraries.items():
        monkeypatch.setattr(reuse, "compiled_reuse", lambda library=library: library)
        models[name] = ReuseModel(shape)
    topics = [[dice.sample(range(num), max(3, num // 4)) for num in sizes] for _ in range(3)]
    for step in range(600):
        if step % 25 == 0:
            topic, batch = dice.choice(topics), dice.choice([1, 1, 1, 5])
        is_prompt = step % 140 == 70
        for layer, num in enumerate(sizes):
            if is_prompt:
                experts = dice.sample(range(num), dice.randint(1, num))
                router = RouterRan(layer, experts, [dice.randint(0, 9) for _ in experts], [False] * len(experts), 40)
            elif batch == 1:
                experts = dice.sample(topic[layer] if dice.random() < 0.9 else range(num), min(3, num))
                router = one_token(layer, experts)
            else:
                experts = dice.sample(range(num), min(num, 9))
                tokens = [dice.choice([0, 1, 1, 2]) for _ in experts]
                router = RouterRan(layer, experts, tokens, [True] * len(experts), batch)
            if dice.random() < 0.98:
                for model in models.values():
                    model.observe(router)
                expected = models["numpy"].worth()
                np.testing.assert_allclose(models["plain"].worth(), expected, rtol=1e-4, atol=1e-5)
                np.testing.assert_array_equal(models["plain"].worth(), models["fastest"].worth())
        if step == 300:
            state = state_of(models["plain"])
            for model in models.values():
                model.restore(state)
    for name, expected in state_of(models["numpy"]).items():
        for library in COMPILERS:
            np.testing.assert_allclose(state_of(models[library])[name], expected, rtol=1e-4, atol=1e-5)


def test_a_library_of_another_version_or_none_at_all_is_left_alone(tmp_path: Path) -> None:
    text, known = SOURCE.read_text(), "expertly_reuse_version(void) { return 1; }"
    assert known in text
    assert compiled_reuse(compile_into(tmp_path / "newer", text.replace(known, known.replace("1", "2")))) is None
    assert compiled_reuse(compile_into(tmp_path / "lacks", text.replace("reuse_restored", "reuse_other"))) is None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "_reuse.so").write_bytes(b"no library")
    assert compiled_reuse(tmp_path / "damaged") is None
    assert compiled_reuse(tmp_path / "nowhere") is None


def test_prompts_teach_nothing_but_what_was_used_lately() -> None:
    dice, model = random.Random(4), ReuseModel(SHAPE)
    ranks(model, told_by_another(100, 5))
    before = state_of(model)["weights"]
    for _ in range(60):
        for layer in range(LAYERS):
            model.observe(prompt(layer, dice))
    np.testing.assert_array_equal(state_of(model)["weights"], before)
    new = ReuseModel(SHAPE)
    new.observe(RouterRan(1, [2, 6], [1, 39], [False, False], 40))
    assert values(new, 1).argsort()[-2:].tolist() == [2, 6]


def test_a_layer_that_is_yet_to_run_is_nearer() -> None:
    model = ReuseModel(SHAPE)
    for layer in (0, 1, 2, 0, 1):  # layer 1 runs
        model.observe(one_token(layer, [5]))
    experts = [SHAPE.expert_id(layer, 5) for layer in (2, 0, 1)]
    nearness = model.worth()[experts] / model._values[experts]
    assert nearness == pytest.approx([NEAR_DISCOUNT ** (num / LAYERS) for num in (1, 2, 3)])
    model.observe(RouterRan(1, [5], [8], [False], 8))
    assert min(model.worth()[SHAPE.expert_id(2, 0) :]) > max(model.worth()[: SHAPE.expert_id(2, 0)]), "of a prompt"


@pytest.mark.parametrize(("experts", "looked_at"), [(32, 9), (128, 9), (256, 3), (512, 1), (600, 1)])
def test_with_many_experts_a_layer_looks_at_fewer_others(experts: int, looked_at: int) -> None:
    model = ReuseModel(geometry(layers=9, experts=experts))
    assert model._arithmetic.weights[4].shape == (experts, looked_at * experts)
    model.observe(one_token(4, [1, 2]))
    assert model.worth()[4 * experts + 1] > model.worth()[4 * experts + 3]
    state = model.state()
    assert state is not None and len(state["weights"]) == num_weights([experts] * 9)


# -- what is kept of it ---------------------------------------------------------------------------------------------


def test_a_new_model_goes_on_with_what_another_learned() -> None:
    model, other = taught(), ReuseModel(SHAPE)
    state = model.state()
    assert state is not None and state["tokens"].tolist() == [1499] * 3
    other.restore(state)
    of_other, of_new = (np.mean(ranks(one, told_by_another(200, 1))) for one in (other, ReuseModel(SHAPE)))
    assert of_other > 0.88 > 0.7 > of_new
    assert other.num_learned == 1499 + 199


def test_rates_are_copies() -> None:
    model = taught()
    state = model.state()
    assert state is not None
    before = {name: array.copy() for name, array in state.items()}
    ranks(model, told_by_another(50, 2))
    other = ReuseModel(SHAPE)
    other.restore(state)
    ranks(other, told_by_another(50, 2))
    for name, array in before.items():
        np.testing.assert_array_equal(state[name], array)


def test_one_that_was_interrupted_while_it_learned_has_nothing_to_give(
    monkeypatch: pytest.MonkeyPatch, in_numpy: None
) -> None:
    model, learn = taught(), LayerReuse._follow
    assert model.state() is not None

    def interrupted(layer: LayerReuse, *args: Any) -> None:
        learn(layer, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LayerReuse, "_follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks(model, told_by_another(50, 3))
    assert model.state() is None
    ranks(model, told_by_another(50, 4))
    assert model.state() is None, "what was half done is never known to be whole again"


def test_another_thread_never_sees_it_half_changed(monkeypatch: pytest.MonkeyPatch, in_numpy: None) -> None:
    """One that looks while a layer learns gets nothing; one that looks between two layers gets it whole."""
    model, follow, seen = taught(), LayerReuse._follow, []

    def looked_at(layer: LayerReuse, *args: Any) -> None:
        looker = threading.Thread(target=lambda: seen.append(model.state()))
        looker.start()
        looker.join()
        follow(layer, *args)

    monkeypatch.setattr(LayerReuse, "_follow", looked_at)
    ranks(model, told_by_another(40, 5))
    assert len(seen) >= 3 and seen == [None] * len(seen)
    assert model.state() is not None


# -- the eviction policy --------------------------------------------------------------------------------------------


def steps(num: int, seed: int) -> list[list[list[int]]]:
    """[step][layer][2 experts]: a topic of 5 steps on average decides from which four experts each layer takes most."""
    dice = random.Random(seed)
    of_topic = [[dice.sample(range(EXPERTS), 4) for _ in range(LAYERS)] for _ in range(6)]
    found, topic = [], 0
    for _ in range(num):
        if dice.random() < 0.2:
            topic = dice.randrange(6)
        layers = []
        for layer in range(LAYERS):
            chosen = dice.sample(of_topic[topic][layer], 2)
            if dice.random() < 0.3:
                chosen[1] = dice.choice([e for e in range(EXPERTS) if e != chosen[0]])
            layers.append(chosen)
        found.append(layers)
    return found


def loads(system: str, routing: list[list[list[int]]], count_from: int, share: float = 0.35) -> int:
    """Experts loaded from that step on."""
    control, num = scheduler(SHAPE, share, system), 0
    for step, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            ran = run_layer(control, layer, experts, check=step % 40 == 0)
            num += len(ran.loads) if step >= count_from else 0
    return num


def test_it_loads_less_than_recency_and_frequency_once_it_has_learned() -> None:
    routing = steps(900, 0)
    plain = min(loads(name, routing, 600) for name in ("lru", "lfu"))
    for scope in ("global", "layer"):
        assert loads(f"expertly:scope={scope}", routing, 600) < 0.95 * plain


def test_the_caches_of_a_model_learn_together_and_those_of_two_do_not() -> None:
    make = EVICTIONS["reuse"].of_model(SHAPE)
    first, second, other = make(4, [0]), make(4, [1]), EVICTIONS["reuse"].make(SHAPE, 4)
    first.needed([3], one_token(0, [3]))
    assert second.score(3) == first.score(3) > 0.0 == other.score(3)


def test_where_all_are_kept_nothing_is_learned() -> None:
    make = EVICTIONS["reuse"].of_model(SHAPE)
    policy, other = (make(LAYERS * EXPERTS - num, range(LAYERS)) for num in (0, 1))
    policy.needed([3], one_token(0, [3]))
    assert other.score(3) == 0.0
    other.needed([3], one_token(0, [3]))
    assert other.score(3) > 0.0


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_victims_are_those_of_sorting(seed: int) -> None:
    """Of hundreds that are kept, with equal scores among them, read to any depth."""
    dice = random.Random(seed)
    shape = geometry(layers=12, experts=64, top_k=4)
    policy, kept = Reuse.make(shape, 300), set[int]()
    for _ in range(60):
        layer = dice.randrange(12)
        experts = dice.sample(range(64), 4)
        policy.needed([layer * 64 + expert for expert in experts], one_token(layer, experts))
        for expert in dice.sample(range(12 * 64), 40):
            if expert in kept:
                kept.remove(expert)
                policy.removed(expert)
            else:
                kept.add(expert)
                policy.admitted(expert)
        protected = set(dice.sample(sorted(kept), min(len(kept), dice.choice([0, 3, 30]))))
        worth = policy.model.worth()
        expected = sorted((float(worth[e]), e) for e in kept if e not in protected)
        depth = dice.choice([1, 5, 40, len(expected)])
        asked = policy.scored_victims(protected)
        assert [one for one, _ in zip(asked, range(depth), strict=False)] == expected[:depth]
        assert policy.score(7) == float(worth[7])


def test_a_prompt_takes_nothing_from_the_layers_that_it_has_yet_to_reach() -> None:
    control = scheduler(SHAPE, 0.5, "expertly")
    for layers in steps(60, 1):
        for layer, experts in enumerate(layers):
            run_layer(control, layer, experts)
    last = {eid for eid in np.flatnonzero(control.slots.resident) if SHAPE.layer_of_expert(eid) == LAYERS - 1}
    for layer in range(LAYERS - 1):
        run_layer(control, layer, list(range(EXPERTS)), tokens=[5] * EXPERTS, decode=False)
    assert last and last <= set(np.flatnonzero(control.slots.resident))


def test_experts_of_pads_alone_count_as_unused() -> None:
    """As where the other devices have a layer's tokens."""
    model = ReuseModel(SHAPE)
    for _ in range(40):
        model.observe(one_token(0, [5]))
        model.observe(RouterRan(1, [3], [0], [False], 1, is_part_of_decode=True))
    first = SHAPE.first_expert_id(1)
    assert np.isfinite(model.worth()).all() and np.ptp(model.worth()[first : first + EXPERTS]) == 0
