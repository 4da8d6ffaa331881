"""An eviction policy of your own, beside LRU: on the demo model, with the same tokens.

    python examples/own_policy.py

A policy gives each expert that one cache keeps a score; the lowest goes first. docs/extending.md has options,
predictors, and the checks that tell whether a policy keeps its promises.
"""

import expertly
from expertly.policies.eviction import ScoredPolicy


class LeastUsed(ScoredPolicy):
    """Keeps the experts that served most tokens."""

    def __init__(self):
        super().__init__()
        self.num_uses = {}

    def score(self, expert):
        return float(self.num_uses.get(expert, 0))

    def used(self, experts, num_tokens, batch_tokens):
        for expert, num in zip(experts, num_tokens, strict=True):
            self.num_uses[expert] = self.num_uses.get(expert, 0) + num
        self.rescore(experts)


def main():
    # A policy is named by where Python imports it from: this file, which lies in the folder that Python looks in first.
    for system in ("lru", "lru:eviction=own_policy.LeastUsed"):
        model, tokenizer = expertly.load(memory="25%", system=system)
        inputs = tokenizer("Once upon a time", return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
        decode = expertly.stats(model).as_dict()["phases"]["decode"]
        print(f"{system}: {decode['hit_rate']:.1%} hits")
        print(f"  {tokenizer.decode(output[0], skip_special_tokens=True)!r}")
        expertly.unload(model)


if __name__ == "__main__":
    main()
