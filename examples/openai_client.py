"""A streamed chat with a server that runs already, by OpenAI's own client.

expertly serve --memory 25%
python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")  # a server with --api-key-file wants one of its keys

(model,) = client.models.list()
print(f"{model.id}:")

stream = client.chat.completions.create(
    model=model.id,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=40,
    temperature=0,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
