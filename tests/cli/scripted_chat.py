"""A program: octavo chat in a terminal, with answers that are written down instead of a model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from octavo.cli import chat
from octavo.cli.chat import Conversation, choose_display
from octavo.cli.chat_lines import HistoryFile
from octavo.core.request import TokensPrompt
from octavo.core.sampling_params import SamplingParams
from tests.cli.scripted_engine import ScriptedEngine

ANSWERS = {
    "long": "# A long answer\n\n" + "\n".join(f"{i}. item **{i}**" for i in range(1, 61)) + "\n\nthe end",
    "code": "```python\n" + "\n".join(f"x{i} = {i}" for i in range(60)) + "\n```\n",
    "evil": "\x1b]0;title\x07\x1b[2J**bold**\x9b5n\x7f &#27;[31m\r\nover",
    "steady": " ".join(f"word{i}" for i in range(60)),
    "slow": " ".join(f"word{i}" for i in range(10_000)),
}


class Answers(ScriptedEngine):
    """Answers ``ANSWERS``, two of them slowly, and else the question."""

    def __init__(self) -> None:
        super().__init__([])
        self.max_model_len = 1_000_000

    def add_request(self, request_id: str, prompt: TokensPrompt, params: SamplingParams, lora_request: None) -> None:
        question = self.conversations[-1][-1]["content"]
        answer = ANSWERS.get(question, f"you said: {question}")
        self.texts = [answer[i : i + 7] for i in range(0, len(answer), 7)]
        self.on_step = (lambda step: time.sleep(0.01)) if question in ("slow", "steady") else (lambda step: None)
        super().add_request(request_id, prompt, params, lora_request)


def main() -> None:
    """Talks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--history", type=Path)
    arguments = parser.parse_args()
    display = choose_display(plain=arguments.plain)
    conversation = Conversation(Answers(), SamplingParams(), None, model="scripted", display=display)  # type: ignore[arg-type]
    chat.talk(conversation, arguments.history and HistoryFile(arguments.history))


if __name__ == "__main__":
    main()
