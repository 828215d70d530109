"""Rows → token ids and loss mask: template, tokenizer, mask policy, truncation. Torch is never imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.dataset.mask import supervised_spans, token_mask
from wellhead.dataset.overlay import Overlay
from wellhead.dataset.read import BadRow, Rejected, Row
from wellhead.dataset.template import ChatTemplate, Span, find_templates
from wellhead.dataset.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Overlay", "Rendered", "Renderer"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as the engine and the trainer see it: `input_ids` int32 [T], `loss_mask` uint8 [T], both truncated to the
    overlay's `max_length`; `full_tokens` is the length before that."""

    line: int
    end: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    full_tokens: int


@dataclass(frozen=True, slots=True)
class _Text:
    row: Row
    text: str
    spans: Sequence[Span]


class Renderer:
    """Renders batches of rows under one overlay. Raises PreflightRefused for an unusable model folder.

    One thread; the tokenizer uses its own threads and lets go of the GIL.
    """

    def __init__(self, model_dir: Path, overlay: Overlay) -> None:
        tokenizer = load_tokenizer(model_dir)
        variables = {**tokenizer.special_tokens, **overlay.template_args}
        self._template = ChatTemplate(find_templates(model_dir), variables, now=datetime.fromisoformat(overlay.date))
        self._backend, self._control = tokenizer.backend, tokenizer.control
        self._overlay = overlay

    def render(self, batch: Sequence[Row | BadRow]) -> list[Rendered | BadRow]:
        """A result for each row, in order; rows that are bad already stay as they are."""
        texts = [self._text(row) if isinstance(row, Row) else row for row in batch]
        # The template's text is complete: special tokens added to it would double its own.
        encodings = iter(
            self._backend.encode_batch([t.text for t in texts if isinstance(t, _Text)], add_special_tokens=False)
        )
        return [self._cut(text, next(encodings)) if isinstance(text, _Text) else text for text in texts]

    def _text(self, row: Row) -> _Text | BadRow:
        try:
            if self._overlay.control_tokens == "reject":
                self._refuse_control_tokens(row)
            text, spans = supervised_spans(self._template, row.messages, row.tools, self._overlay.mask)
        except Rejected as why:
            return BadRow(row.line, row.end, why.reason, why.detail)
        return _Text(row, text, spans)

    def _refuse_control_tokens(self, row: Row) -> None:
        for number, message in enumerate(row.messages, 1):
            for text in _strings(message):
                if found := self._control.search(text):
                    raise Rejected("control_token", f"message {number} ({message['role']}): {found[0]!r}")
        for text in _strings(row.tools):
            if found := self._control.search(text):
                raise Rejected("control_token", f"tools: {found[0]!r}")

    def _cut(self, source: _Text, encoding: Any) -> Rendered | BadRow:
        row, limit = source.row, self._overlay.max_length
        ids = np.array(encoding.ids, np.int32)
        mask = token_mask(encoding, len(ids), source.text, source.spans)
        if len(ids) and mask.all():
            return BadRow(row.line, row.end, "all_supervised", f"all {len(ids)} tokens")
        if not mask[:limit].any():
            cut = f"in the first {limit} of {len(ids)} tokens" if mask.any() else f"among {len(ids)} tokens"
            return BadRow(row.line, row.end, "no_supervised_tokens", f"none {cut}")
        return Rendered(row.line, row.end, ids[:limit], mask[:limit], len(ids))


def _strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too: a template may print them."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
