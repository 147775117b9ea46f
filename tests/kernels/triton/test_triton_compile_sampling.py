"""The sampling kernels compiled for a Hopper GPU, without one; see ``compiling``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.triton.compiling import Compiled, compiled, tell

pytestmark = pytest.mark.slow

#: Of common models, the longest that are supported, and a short one; odd sizes cannot be read 16 bytes at a time.
VOCABULARIES = (128_256, 50_257, 262_144, 7)


def choose(vocab: int, masked: bool) -> None:
    from octavo.kernels.triton.sampling import choose_tokens

    numbers, counts = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    keys = torch.zeros(64, 2, dtype=torch.int32)
    mask = torch.zeros(64, -(-vocab // 32), dtype=torch.int32) if masked else None
    choose_tokens(torch.empty(64, vocab), numbers, counts, numbers, numbers, keys, mask)


def score(vocab: int, k: int) -> None:
    from octavo.kernels.triton.sampling import token_logprobs

    tokens = torch.zeros(64, dtype=torch.int64)
    token_logprobs(torch.empty(64, vocab), tokens, tokens, k)


@pytest.fixture(scope="module")
def launches() -> list[Compiled]:
    return compiled(__file__)


def test_every_launch_compiles(launches: list[Compiled]) -> None:
    assert len(launches) == 2 * (2 * len(VOCABULARIES) + 3)


def test_hardly_a_register_is_spilled(launches: list[Compiled]) -> None:
    assert {(c.case, c.kernel): c.stack for c in launches if c.stack > 128} == {}


def test_surveys_fill_the_card_and_read_16_bytes_at_once(launches: list[Compiled]) -> None:
    surveys = [c for c in launches if c.kernel == "survey_kernel" and "128256" in c.case]
    assert surveys
    for survey in surveys:
        assert survey.count("LDG.E.128"), survey
        assert survey.registers <= 72, survey  # so that 7 programs of 4 warps share a multiprocessor
        assert survey.programs[0] * survey.programs[1] > 1000


def main() -> None:
    cases: dict[str, Callable[[], None]] = {f"choose {v}": partial(choose, v, False) for v in VOCABULARIES}
    cases |= {f"choose {v}, masked": partial(choose, v, True) for v in VOCABULARIES}
    for k in (0, 1, 100):
        cases[f"score 128256, {k}"] = partial(score, 128_256, k)
    tell(cases.items())


if __name__ == "__main__":
    main()
