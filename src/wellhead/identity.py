"""Which model: its folder, its shape, and the hashes that tell two checkpoints apart. Reads no tensor into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellhead.core import ModelIdentity, canonical_json
from wellhead.errors import PreflightRefused, UsageError

ALIASES = {"smollm2-demo": ("models", "smollm2-demo")}
"""Names that stand for a folder in the cache. A name from outside never becomes part of a path."""

_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16
_MAX_CONFIG_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""

_VOLATILE_KEYS = {"transformers_version", "_name_or_path"}
"""What a mere `save_pretrained` rewrites; it does not change a number."""

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of config.json that bytes and limits follow from."""

    blocks: int
    hidden_size: int
    max_positions: int | None
    architecture: str
    quantisation: str | None


def cache_dir() -> Path:
    """Where wellhead keeps models: $WELLHEAD_CACHE, else ~/.cache/wellhead."""
    return Path(os.environ.get("WELLHEAD_CACHE") or Path.home() / ".cache" / "wellhead")


def resolve_model(name_or_path: str | Path) -> Path:
    """The model's folder, which holds config.json. Downloads nothing; raises UsageError if there is no such folder."""
    alias = ALIASES.get(str(name_or_path))
    folder = cache_dir().joinpath(*alias) if alias else Path(name_or_path)
    if (folder / "config.json").is_file():
        return folder
    if alias:
        raise UsageError(f"the model {name_or_path} is not in the cache yet ({folder})", "make it once: make model")
    if folder.is_dir():
        raise UsageError(f"{folder} holds no config.json", "give the folder of a Transformers checkpoint")
    raise UsageError(
        f"no folder {str(name_or_path)!r}, and no model of that name is known",
        f"give the folder of a downloaded checkpoint, or one of: {', '.join(ALIASES)}",
    )


def model_identity(path: Path) -> ModelIdentity:
    """Hashes config and weights: about 1 MiB read a weight file. Raises PreflightRefused for unreadable files.

    Without weight files (the stub engine needs none) `weights_hash` is the hash of an empty list.
    """
    config = read_config(path)
    weights = [_weight_file(file) for file in weight_files(path)]
    revision = path.resolve().name if path.resolve().parent.name == "snapshots" else None
    return ModelIdentity(
        name=_display_name(path),
        config_hash=_hash(_without_volatile(config)),
        weights_hash=_hash(weights),
        quantisation=_quantisation(config),
        revision=revision,
    )


def model_shape(path: Path) -> ModelShape:
    """Reads config.json, nested text configurations too. Raises PreflightRefused where a number is missing."""
    config = read_config(path)
    text = next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), config)
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    blocks, hidden = _first_int(text, _BLOCKS), _first_int(text, _HIDDEN)
    if blocks is None or hidden is None:
        missing = _BLOCKS[0] if blocks is None else _HIDDEN[0]
        raise PreflightRefused(f"{path / 'config.json'} has no {missing}", "wellhead needs a decoder-only text model")
    return ModelShape(blocks, hidden, _first_int(text, _POSITIONS), str(named or "unknown"), _quantisation(config))


def read_config(path: Path) -> dict[str, Any]:
    """config.json as a dictionary. Raises PreflightRefused."""
    return read_json_object(path / "config.json")


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder, of bounded size. Raises PreflightRefused naming the file."""
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise PreflightRefused(f"{file} is larger than {_MAX_CONFIG_BYTES >> 20} MiB", "is this a model folder?")
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise PreflightRefused(f"cannot read {file}: {error}", "is the download complete?") from error
    if not isinstance(value, dict):
        raise PreflightRefused(f"{file} is no JSON object", "is the download complete?")
    return value


def weight_files(path: Path) -> list[Path]:
    """The files an engine would load, by name: safetensors if there are any, else pytorch_model*.bin, else gguf."""
    for patterns in (("*.safetensors", "*.safetensors.index.json"), ("pytorch_model*.bin", "*.bin.index.json")):
        if any(path.glob(patterns[0])):
            return sorted(file for pattern in patterns for file in path.glob(pattern))
    return sorted(path.glob("*.gguf"))


def _weight_file(file: Path) -> dict[str, Any]:
    try:
        size = file.stat().st_size
        entry: dict[str, Any] = {"name": file.name, "size": size, "sample": _sample_hash(file, size)}
        if file.suffix == ".safetensors":
            entry["tensors"] = _tensors(file, size)
    except OSError as error:
        raise PreflightRefused(f"cannot read the weight file {file}: {error}", "is the download complete?") from error
    return entry


def _sample_hash(file: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        for offset, length in _windows(size):
            stream.seek(offset)
            digest.update(stream.read(length))
    return digest.hexdigest()


def _windows(size: int) -> Iterator[tuple[int, int]]:
    """1 MiB in all, at evenly spread offsets, the first and the last byte included; a small file whole."""
    if size <= _SAMPLE_BYTES:
        yield 0, size
        return
    length = _SAMPLE_BYTES // _SAMPLES
    for number in range(_SAMPLES):
        yield number * (size - length) // (_SAMPLES - 1), length


def _tensors(file: Path, size: int) -> list[list[Any]]:
    """[name, dtype, shape] of every tensor, by name, from the header alone."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise PreflightRefused(f"{file} is no whole safetensors file", "is the download complete?")
        try:
            header = json.loads(stream.read(length))
            return sorted([name, item["dtype"], item["shape"]] for name, item in header.items() if name[:2] != "__")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PreflightRefused(f"the header of {file} is damaged: {error}", "download it again") from error


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(item) for key, item in value.items() if key not in _VOLATILE_KEYS}
    return value


def _quantisation(config: Mapping[str, Any]) -> str | None:
    """`quant_method` and bits if there are any; the full settings are in the config's hash."""
    text: dict[str, Any] = next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), {})
    settings = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method, bits = settings.get("quant_method", "unknown"), settings.get("bits")
    return f"{method}-{bits}bit" if isinstance(bits, int) else str(method)


def _display_name(path: Path) -> str:
    resolved = path.resolve()
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    return resolved.name


def _first_int(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _hash(value: Any) -> str:
    return hashlib.blake2b(canonical_json(value), digest_size=16).hexdigest()
