"""dspy: a prediction."""
# CONFIGURE `dspy.LM("openai/NAME", api_base="http://HOST:8000/v1", api_key="none")`

from __future__ import annotations

import os

import dspy

model = dspy.LM("openai/" + os.environ["MODEL"], api_base=os.environ["URL"] + "/v1", api_key="none", max_tokens=64)
assert model("Name a colour.")
print("WORKS calls of the model")
