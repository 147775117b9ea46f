"""KV specs: bytes of a token, and layers that share block tables."""

from __future__ import annotations

import pytest

from octavo.config.kv_spec import KVSpec, LayerGroup, group_layers

FULL, WINDOWED = KVSpec("full", 2, 8, "bfloat16"), KVSpec("sliding", 2, 8, "bfloat16", window=16)


def test_layers_of_equal_specs_are_one_group_in_the_order_of_their_first() -> None:
    assert group_layers([WINDOWED, FULL, KVSpec("sliding", 2, 8, "bfloat16", window=16), FULL]) == [
        LayerGroup(WINDOWED, (0, 2)),
        LayerGroup(FULL, (1, 3)),
    ]
    assert group_layers([FULL] * 3) == [LayerGroup(FULL, (0, 1, 2))]
    assert group_layers([WINDOWED, KVSpec("sliding", 2, 8, "bfloat16", window=17)])[1].layers == (1,)
    assert group_layers([]) == []


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (FULL, 2 * 2 * 8 * 2),
        (WINDOWED, 2 * 2 * 8 * 2),
        (KVSpec("cross", 3, 8, "float32"), 2 * 3 * 8 * 4),
        (KVSpec("full", 2, 8, "int8"), 2 * 2 * (8 + 4)),
        (KVSpec("full", 2, 8, "fp8"), 2 * 2 * (8 + 4)),
        (KVSpec("latent", 1, 576, "bfloat16"), 576 * 2),
        (KVSpec("none", 0, 0, "bfloat16"), 0),
    ],
)
def test_bytes_of_a_token(spec: KVSpec, size: int) -> None:
    assert spec.bytes_per_token == size
