"""Texts and vectors of data sets with Ray: stages of Ray Data (``stage.py``), and runs over files (``runs.py``).

>>> import ray, octavo.data
>>> answered = octavo.data.generate(ray.data.read_parquet("prompts/"), model="smollm2-135m")
>>> embedded = octavo.data.embed(ray.data.read_parquet("texts/"), model="all-minilm-l6-v2")
>>> octavo.data.run("prompts.jsonl", "answers/", model="smollm2-135m")
"""

from octavo.data.runs import run
from octavo.data.stage import embed, generate

__all__ = ["embed", "generate", "run"]
