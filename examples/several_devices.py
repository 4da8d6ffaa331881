"""Experts spread over two devices: the tokens are those of one.

    python examples/several_devices.py [cuda:0,cuda:1]

Without an argument these are two logical devices of the CPU, with slots, readers and decisions of their own.
"""

import sys

import expertly

devices = sys.argv[1] if len(sys.argv) > 1 else "cpu:0,cpu:1"
texts = []
for where in ({"devices": devices}, {"device": devices.split(",")[0].replace("cpu:0", "cpu")}):
    model, tokenizer = expertly.load(memory="50%", system="lru", **where)
    inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    texts.append(tokenizer.decode(output[0], skip_special_tokens=True))
    stats = expertly.stats(model).as_dict()
    for one in stats.get("devices", []):
        print(f"{one['device']}: {one['experts']} experts, {one['decode']['hit_rate']:.0%} hits")
    expertly.unload(model)

print(texts[0])
print("the same on one device" if texts[0] == texts[1] else f"on one device: {texts[1]}")
