"""The model's tokenizer, from its folder alone: no download, no remote code, no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellhead.core import canonical_json
from wellhead.errors import PreflightRefused
from wellhead.identity import read_json_object

if TYPE_CHECKING:
    import tokenizers

_NEVER = re.compile(r"(?!)")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`backend` never truncates, pads or adds tokens. `special_tokens` (bos_token, …) are what templates see;
    `control` finds the text of any control token."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, Any]
    control: re.Pattern[str]


def tokenizer_hash(model_dir: Path) -> str:
    """BLAKE2b-128, in hex, of every file that decides token ids. Imports nothing heavy.

    Raises PreflightRefused if there is no tokenizer.json."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update((model_dir / "tokenizer.json").read_bytes())
    except OSError as error:
        raise _no_tokenizer(model_dir, str(error.strerror)) from error
    for name in _SETTINGS:
        if (model_dir / name).is_file():
            settings = {k: v for k, v in read_json_object(model_dir / name).items() if k != "chat_template"}
            digest.update(canonical_json([name, settings]))
    return digest.hexdigest()


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises PreflightRefused. Imports transformers (about a second), which need not have torch."""
    if not (model_dir / "tokenizer.json").is_file():
        raise _no_tokenizer(model_dir, "there is no such file")
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    # It warns that this is not the class which the checkpoint names: on purpose, since that one may bring code.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # a foreign library over foreign files: whatever it raises means that they are unusable
        raise _no_tokenizer(model_dir, f"{type(error).__name__}: {error}"[:300]) from error
    backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    # With add_special_tokens=False it only trims white space off the offsets, which would shift the mask.
    backend.post_processor = None
    added = backend.get_added_tokens_decoder().values()
    control = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, control))) if control else _NEVER
    return Tokenizer(backend, dict(loaded.special_tokens_map), pattern)


def _no_tokenizer(model_dir: Path, why: str) -> PreflightRefused:
    return PreflightRefused(
        f"cannot use {model_dir / 'tokenizer.json'}: {why}",
        "wellhead needs the fast tokenizer's file; where a model has none, convert it once: "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
    )
