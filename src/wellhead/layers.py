"""Layers by one convention, r_k = the residual stream after k blocks, and the words that say so."""

from __future__ import annotations

import re
from collections.abc import Sequence

from wellhead.core import FINAL, default_layers
from wellhead.errors import UsageError

_BLOCK_OUTPUT = "block-output:"
_NUMBER = re.compile(r"[0-9]{1,6}")
_FEWEST_BLOCKS_FOR_DEFAULT = 6
"""Below this, two of the three default layers fall together or below the embedding."""


def parse_layers(text: str | None, blocks: int) -> tuple[int, ...]:
    """The k of each r_k to capture, ascending.

    `text` is "3,31,59" (r_k numbers, 0 ≤ k < blocks), "block-output:2,30,58" (the numbering of tools that count the
    block whose *output* is taken: block 2's output is r_3), or None for `default_layers`. r_n, the state after the last
    block, is no layer: it is stored as the final state. Raises UsageError for anything else.
    """
    if text is None:
        if blocks < _FEWEST_BLOCKS_FOR_DEFAULT:
            raise UsageError(
                f"a model of {blocks} blocks has no three distinct default layers",
                f"name the layers: --layers takes r_k numbers from 0 to {blocks - 1}",
            )
        return default_layers(blocks)
    is_block_output = text.startswith(_BLOCK_OUTPUT)
    numbers = _numbers(text.removeprefix(_BLOCK_OUTPUT), text)
    layers = [number + 1 for number in numbers] if is_block_output else numbers
    for number, layer in zip(numbers, layers, strict=True):
        if layer >= blocks:
            what = f"the output of block {number}" if is_block_output else f"r_{layer}"
            raise UsageError(f"--layers {text!r}: {what} {_why_out_of_range(layer, blocks)}", _hint(blocks))
    if len(set(layers)) != len(layers):
        raise UsageError(f"--layers {text!r} names a layer twice", _hint(blocks))
    return tuple(sorted(layers))


def layer_words(layers: Sequence[int], blocks: int) -> list[str]:
    """What each layer is, for people: "r_3 = after block 3 of 61". Ascending, without the final state."""
    return [_words(layer, blocks) for layer in sorted(layers)]


def final_words(blocks: int, norm: str) -> str:
    """What the final state is, for people. `norm` is `post_norm` or `pre_norm`."""
    how = "after the final norm" if norm == "post_norm" else "before the final norm"
    return f"{FINAL} = after block {blocks} of {blocks}, {how}"


def _words(layer: int, blocks: int) -> str:
    if layer == 0:
        return f"r_0 = the embedding, before block 1 of {blocks}"
    return f"r_{layer} = after block {layer} of {blocks}"


def _numbers(part: str, text: str) -> list[int]:
    words = [word.strip() for word in part.split(",")]
    bad = [word for word in words if not _NUMBER.fullmatch(word)]
    if bad:
        raise UsageError(
            f"--layers {text!r}: {bad[0]!r} is no layer number",
            "write r_k numbers such as 3,31,59, or block-output:2,30,58 for the same layers in the other numbering",
        )
    return [int(word) for word in words]


def _why_out_of_range(layer: int, blocks: int) -> str:
    if layer == blocks:
        return f"is the state after the last of {blocks} blocks, which is always stored as the final state"
    return f"does not exist in a model of {blocks} blocks"


def _hint(blocks: int) -> str:
    return f"--layers takes distinct r_k numbers from 0 (the embedding) to {blocks - 1}"
