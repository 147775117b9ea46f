"""mini-swe-agent: a query of its model."""
# CONFIGURE `OPENAI_API_BASE=http://HOST:8000/v1`, `OPENAI_API_KEY=none`, the model `openai/NAME`

from __future__ import annotations

import os

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/" + os.environ["MODEL"],
    model_kwargs={"api_base": os.environ["URL"] + "/v1", "api_key": "none", "max_tokens": 32},
)
try:
    answer = model.query([{"role": "user", "content": "List the files."}])
except Exception as e:  # a model without sense does not call the tool, which the agent tells it
    assert "FormatError" in type(e).__name__, e
print("WORKS queries with tools")
