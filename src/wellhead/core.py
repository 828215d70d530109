"""The frozen types that every part of wellhead shares. Standard library only at run time.

A causal model's states depend on its token ids and on how they were computed, and on nothing else. So a sample is
named by its token ids (`sample_id`), a run by how it computes (`CaptureSpec.fingerprint`), and everything else that a
row carries (loss mask, template, source line) is an *overlay* that lives in the plan and never in the states.

Layers are numbered by one convention everywhere: r_k is the residual stream after k blocks, so r_0 is the embedding
and r_n the state after the last block. Stored tensors are named `r<k>`, `final` and `input_ids`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bits = NDArray[np.uint16]
    """bf16 values as their bit patterns, [tokens, hidden_size]."""

SCHEMA_VERSION = 0
"""Version of every stored byte. It stays 0, without any promise, until a drafter has been trained from a store."""

FINAL = "final"
INPUT_IDS = "input_ids"
BYTES_PER_VALUE = 2
"""States are stored as bf16, whatever dtype computed them."""

Dtype = Literal["bfloat16", "float32"]
FinalNorm = Literal["post_norm", "pre_norm"]
FinalRows = Literal["all", "supervised"]
Codec = Literal["planes-zstd", "raw"]


def sample_id(input_ids_le: bytes) -> str:
    """BLAKE2b-128, in hex, of the token ids as little-endian int32. Equal ids, equal states: one sample."""
    return hashlib.blake2b(input_ids_le, digest_size=16).hexdigest()


def layer_name(k: int) -> str:
    """The tensor name of r_k."""
    return f"r{k}"


def layer_number(name: str) -> int:
    """The k of a tensor name `r<k>`; ValueError for anything else."""
    digits = name[1:]
    if name[:1] != "r" or not (digits.isascii() and digits.isdigit()) or str(int(digits)) != digits:
        raise ValueError(f"{name!r} is no layer name: expected r<k>, such as r3")
    return int(digits)


def state_names(layers: Sequence[int]) -> tuple[str, ...]:
    """The state tensors of a sample in stored order: layers ascending, then the final state."""
    return (*(layer_name(k) for k in sorted(layers)), FINAL)


def default_layers(blocks: int) -> tuple[int, ...]:
    """r_2, r_⌊n/2⌋ and r_{n-3}: what every EAGLE-3 tool takes by default, whatever it calls them."""
    return tuple(sorted({2, blocks // 2, blocks - 3}))


def raw_bytes(tokens: int, layers: int, hidden_size: int) -> int:
    """Bytes of the states of `tokens` tokens: `layers` layers and the final state, in bf16."""
    return tokens * (layers + 1) * hidden_size * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine is asked to capture.

    `input_ids` is int32 [T]; `id` is `sample_id` of it. `loss_mask` is uint8 [T] with 1 where the drafter is
    supervised; it belongs to the overlay and does not change the states.
    """

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]

    @property
    def tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class PlanItem:
    """A distinct sample of the plan: what scheduling needs to know, without its token ids.

    `generation` is the number of the first plan of this run that named the sample. Batches never cross generations,
    so rows added later do not regroup (and so do not change the low bits of) the rows that were there before.
    """

    id: str
    tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights. `name` is for people and is not part of the identity.

    `config_hash` covers config.json; `weights_hash` covers every weight file's name, size, tensor names, shapes and
    dtypes, and 1 MiB sampled from it, so two fine-tunes of one architecture differ.
    """

    name: str
    config_hash: str
    weights_hash: str
    quantisation: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """What determines the numbers of a run. Written once; a run never holds states of two specs.

    Layers are not part of it: the ledger says which tensors exist, and more layers of the same model may be added.
    """

    model: ModelIdentity
    blocks: int
    hidden_size: int
    compute_dtype: Dtype = "bfloat16"
    final: FinalNorm = "post_norm"
    final_rows: FinalRows = "all"
    schema: int = SCHEMA_VERSION

    @property
    def fingerprint(self) -> str:
        """BLAKE2b-128, in hex, of the canonical JSON of everything but the model's display name."""
        return hashlib.blake2b(canonical_json(self._identity()), digest_size=16).hexdigest()

    def differences(self, other: CaptureSpec) -> list[tuple[str, Any, Any]]:
        """(field, ours, theirs) for every field in which the fingerprints' inputs differ."""
        mine, theirs = _flat(self._identity()), _flat(other._identity())
        return [(key, mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CaptureSpec:
        return cls(**{**value, "model": ModelIdentity(**value["model"])})

    def _identity(self) -> dict[str, Any]:
        identity = asdict(self)
        del identity["model"]["name"]
        return identity


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who computed a shard: recorded with it, compared on resume by `engine` and `version`."""

    engine: str
    version: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"engine": self.engine, "version": self.version, "details": dict(self.details)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        return cls(value["engine"], value["version"], value["details"])


@dataclass(frozen=True, slots=True)
class Capture:
    """A payload that passed every check of `capture.check`: what the store may keep.

    `states` maps tensor names (`r<k>`, `final`) to bf16 bits [T, H], C-contiguous, possibly memory-mapped. It may
    hold fewer tensors than the run has: a layer added later comes alone. The store never changes the arrays.
    """

    id: str
    input_ids: NDArray[np.int32]
    states: Mapping[str, Bits]
    provenance: Provenance

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def raw_bytes(self) -> int:
        return sum(bits.nbytes for bits in self.states.values())


def canonical_json(value: Any) -> bytes:
    """One text for one value: sorted keys, no spaces, UTF-8. The input of every hash of a structure."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            out |= _flat(item, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = item
    return out
