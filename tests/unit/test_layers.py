"""Layer numbers: one convention, the other one translated, everything else refused in words."""

from __future__ import annotations

import pytest

from wellhead.errors import UsageError
from wellhead.layers import final_words, layer_words, parse_layers


@pytest.mark.parametrize(
    ("text", "blocks", "layers"),
    [
        (None, 61, (2, 30, 58)),
        (None, 30, (2, 15, 27)),
        (None, 6, (2, 3)),
        ("3,31,59", 61, (3, 31, 59)),
        ("59, 3 ,31", 61, (3, 31, 59)),
        ("block-output:2,30,58", 61, (3, 31, 59)),
        ("block-output:1,14,26", 30, (2, 15, 27)),
        ("0", 30, (0,)),
        ("29", 30, (29,)),
        ("block-output:28", 30, (29,)),
    ],
)
def test_layers(text: str | None, blocks: int, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, blocks) == layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("30", "r_30 is the state after the last of 30 blocks"),
        ("block-output:29", "the output of block 29 is the state after the last"),
        ("31", "r_31 does not exist"),
        ("2,2", "twice"),
        ("block-output:2,2", "twice"),
        ("", "''"),
        ("2,", "''"),
        ("-1", "'-1'"),
        ("2.0", "'2.0'"),
        ("r3", "'r3'"),
        ("²", "'²'"),
        ("block-input:2", "'block-input:2'"),
        ("9" * 5000, "no layer number"),
    ],
)
def test_what_is_no_layer(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_layers(text, 30)
    assert words in refused.value.message
    assert refused.value.hint


def test_a_model_too_small_for_the_default() -> None:
    with pytest.raises(UsageError, match="5 blocks"):
        parse_layers(None, 5)


def test_words() -> None:
    assert layer_words((31, 3), 61) == ["r_3 = after block 3 of 61", "r_31 = after block 31 of 61"]
    assert layer_words((0,), 4) == ["r_0 = the embedding, before block 1 of 4"]
    assert final_words(61, "post_norm") == "final = after block 61 of 61, after the final norm"
    assert final_words(61, "pre_norm") == "final = after block 61 of 61, before the final norm"
