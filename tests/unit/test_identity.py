"""Which model: two checkpoints that differ are told apart, one that was merely moved is not."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wellhead.errors import PreflightRefused, UsageError
from wellhead.identity import model_identity, model_shape, resolve_model, weight_files

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 8,
          "max_position_embeddings": 64, "transformers_version": "5.0", "_name_or_path": "a"}  # fmt: skip


def safetensors(tensors: dict[str, tuple[str, list[int]]], data: bytes, order: int = 1) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in list(tensors.items())[::order]:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


TENSORS = {"a": ("BF16", [2, 3]), "b": ("F32", [4])}


def folder(path: Path, config: Any = None, **files: bytes) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    for name, data in (files or {"model.safetensors": safetensors(TENSORS, b"x" * 100)}).items():
        (path / name).write_bytes(data)
    return path


def test_the_same_files_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    a, b = model_identity(folder(tmp_path / "a")), model_identity(folder(tmp_path / "b"))
    assert (a.config_hash, a.weights_hash) == (b.config_hash, b.weights_hash)
    assert (a.name, b.name, a.revision, a.quantisation) == ("a", "b", None, None)


def test_what_saving_again_changes_is_no_difference(tmp_path: Path) -> None:
    a = model_identity(folder(tmp_path / "a"))
    b = model_identity(folder(tmp_path / "b", dict(reversed(CONFIG.items())) | {"transformers_version": "6",
                                                                                "_name_or_path": "b"}))  # fmt: skip
    assert a.config_hash == b.config_hash
    assert model_identity(folder(tmp_path / "c", CONFIG | {"hidden_size": 9})).config_hash != a.config_hash
    nested = [CONFIG | {"text_config": {"transformers_version": v, "x": x}} for v, x in (("1", 1), ("2", 1), ("1", 2))]
    hashes = [model_identity(folder(tmp_path / f"n{n}", c)).config_hash for n, c in enumerate(nested)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_every_difference_of_the_weights_is_seen(tmp_path: Path) -> None:
    data = b"x" * 100
    variants: list[dict[str, bytes]] = [
        {"model.safetensors": safetensors(TENSORS, data)},
        {"other.safetensors": safetensors(TENSORS, data)},
        {"model.safetensors": safetensors(TENSORS, data + b"x")},
        {"model.safetensors": safetensors(TENSORS, b"y" + data[1:])},
        {"model.safetensors": safetensors(TENSORS, data[:-1] + b"y")},
        {"model.safetensors": safetensors(TENSORS | {"c": ("F32", [1])}, data)},
        {"model.safetensors": safetensors(TENSORS | {"a": ("BF16", [3, 2])}, data)},
        {"model.safetensors": safetensors(TENSORS | {"a": ("F16", [2, 3])}, data)},
        {"model.safetensors": safetensors(TENSORS, data), "model.safetensors.index.json": b"{}"},
        {"model-1.safetensors": safetensors(TENSORS, data), "model-2.safetensors": safetensors(TENSORS, data)},
        {"pytorch_model.bin": data},
        {"model.gguf": data},
        {"training_args.bin": data},
    ]
    hashes = [model_identity(folder(tmp_path / str(n), None, **files)).weights_hash
              for n, files in enumerate(variants)]  # fmt: skip
    assert len(set(hashes)) == len(variants)


def test_two_fine_tunes_of_one_architecture_differ_in_any_spread_change(tmp_path: Path) -> None:
    size = 20 << 20
    base = bytearray(size)
    hashes = set()
    for number, change in enumerate((None, slice(0, size, 4096), slice(size - 1, size), slice(size // 2, size))):
        data = bytearray(base)
        if change is not None:
            data[change] = b"\1" * len(data[change])
        hashes.add(model_identity(folder(tmp_path / str(number), **{"model.safetensors": safetensors(TENSORS, data)}))
                   .weights_hash)  # fmt: skip
    assert len(hashes) == 4


def test_what_an_engine_would_not_load_does_not_count(tmp_path: Path) -> None:
    whole = safetensors(TENSORS, b"x")
    extra = folder(tmp_path / "a", **{"model.safetensors": whole, "training_args.bin": b"1", "pytorch_model.bin": b"2"})
    assert [file.name for file in weight_files(extra)] == ["model.safetensors"]
    bare = folder(tmp_path / "b", **{"model.safetensors": whole})
    assert model_identity(extra).weights_hash == model_identity(bare).weights_hash


def test_revision_and_name_come_from_the_cache_layout(tmp_path: Path) -> None:
    snapshot = folder(tmp_path / "models--org--name" / "snapshots" / "abc123")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        identity = model_identity(path)
        assert (identity.name, identity.revision) == ("org/name", "abc123")


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"quant_method": "fp8"}, "fp8"), ({"quant_method": "gptq", "bits": 4}, "gptq-4bit"), ({"x": 1}, "unknown")],
)
@pytest.mark.parametrize("nested", [False, True])
def test_quantisation(tmp_path: Path, settings: dict[str, Any], name: str, nested: bool) -> None:
    config = {"quantization_config": settings}
    path = folder(tmp_path / "m", CONFIG | ({"text_config": CONFIG | config} if nested else config))
    assert model_identity(path).quantisation == model_shape(path).quantisation == name


@pytest.mark.parametrize(
    "data", [b"", b"1234567", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 50) + b"{}",
             struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"xx", struct.pack("<Q", 9) + b'{"a": {}}']
)  # fmt: skip
def test_damaged_weight_files_are_named(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PreflightRefused, match=r"model\.safetensors"):
        model_identity(folder(tmp_path / "m", **{"model.safetensors": data}))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONFIG, (4, 8, 64, "LlamaForCausalLM")),
        ({"model_type": "gpt2", "n_layer": 3, "n_embd": 5, "n_positions": 7}, (3, 5, 7, "gpt2")),
        ({"architectures": ["KimiK25"], "text_config": {"num_hidden_layers": 61, "hidden_size": 7168}},
         (61, 7168, None, "KimiK25")),
    ],
)  # fmt: skip
def test_shape(tmp_path: Path, config: dict[str, Any], shape: tuple[Any, ...]) -> None:
    found = model_shape(folder(tmp_path / "m", config))
    assert (found.blocks, found.hidden_size, found.max_positions, found.architecture) == shape


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"hidden_size": 8}', '{"num_hidden_layers": true}'])
def test_damaged_configs_are_refused(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_text(text)
    with pytest.raises(PreflightRefused):
        model_shape(path)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLHEAD_CACHE", str(tmp_path))
    with pytest.raises(UsageError) as missing:
        resolve_model("smollm2-demo")
    assert missing.value.hint == "make it once: make model"
    made = folder(tmp_path / "models" / "smollm2-demo")
    assert resolve_model("smollm2-demo") == made
    assert resolve_model(str(made)) == resolve_model(made) == made
    for name in ("gpt2", "../models/smollm2-demo", "smollm2-demo/", str(tmp_path)):
        with pytest.raises(UsageError):
            resolve_model(name)


def test_reading_an_identity_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    code = (
        "import sys; from pathlib import Path; from wellhead.identity import model_identity, model_shape\n"
        f"model_identity(Path({str(path)!r})); model_shape(Path({str(path)!r}))\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
