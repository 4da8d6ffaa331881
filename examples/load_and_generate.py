"""A model in a quarter of its expert memory.

    python examples/load_and_generate.py [MODEL]

MODEL: a folder or a hub id; without one, the demo model.
"""

import sys

import expertly

model, tokenizer = expertly.load(*sys.argv[1:], memory="25%")

# From here on it is an ordinary transformers model.
inputs = tokenizer("The old man looked at the sea and said", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))

decode = expertly.stats(model).as_dict()["phases"]["decode"]
print(f"{decode['hit_rate']:.0%} of the experts were in memory when they were needed")

expertly.unload(model)  # frees threads, files and memory; leaving the program does so, too
