"""Offline generation over data sets with Ray: a stage of Ray Data, and runs over files that go on after a stop.

>>> import ray, octavo.data
>>> answered = octavo.data.generate(ray.data.read_parquet("prompts/"), model="smollm2-135m")
>>> octavo.data.run("prompts.jsonl", "answers/", model="smollm2-135m")
"""

from octavo.data.runs import run
from octavo.data.stage import generate

__all__ = ["generate", "run"]
