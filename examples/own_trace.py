"""Records which experts a model chooses for your prompts, and reads it back.

    python examples/own_trace.py FOLDER [PROMPT ...]

FOLDER is a new or an empty one. `expertly lab trace record` does the same from a file of prompts; what it makes, and
this, goes into `expertly lab simulate`.
"""

import sys
from collections import Counter
from pathlib import Path

import expertly
from expertly_lab.recording import record
from expertly_lab.trace.reader import Trace

folder = Path(sys.argv[1])
prompts = sys.argv[2:] or ["Once upon a time", "The ship left the harbour at dawn", "She opened the letter and"]

model, tokenizer = expertly.load(memory="50%")
with record(model, folder, name="demo") as recording:
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        recording.begin_request(prompt=prompt, num_prompt_tokens=inputs["input_ids"].shape[1])
        model.generate(**inputs, max_new_tokens=16, do_sample=False)
expertly.unload(model)

trace = Trace.open(folder)
experts = trace.rows("experts", 0, trace.num_rows)  # [tokens, layers, top-k]
print(f"{len(trace.requests)} requests, {trace.num_rows} tokens, {experts.shape[1]} layers, top-{experts.shape[2]}")
for layer in range(experts.shape[1]):
    busiest = Counter(experts[:, layer].ravel().tolist()).most_common(3)
    print(f"layer {layer}: " + ", ".join(f"expert {expert} {num} times" for expert, num in busiest))
