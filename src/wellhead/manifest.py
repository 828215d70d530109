"""run.json: what a run was asked for, and the capture spec that every state in it obeys. Written once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellhead.core import SCHEMA_VERSION, CaptureSpec, canonical_json, sample_id
from wellhead.errors import OtherSpec, StoreDamaged, UsageError
from wellhead.paths import RunPaths
from wellhead.store.atomic import write_atomic


@dataclass(frozen=True, slots=True)
class Manifest:
    """`layers` is what the run was begun with; layers added later are known by the ledger alone."""

    spec: CaptureSpec
    layers: tuple[int, ...]
    model_path: str
    engine: str
    data: str
    created: str
    version: str

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "fingerprint": self.spec.fingerprint,
            "spec": self.spec.to_json(),
            "layers": list(self.layers),
            "model_path": self.model_path,
            "engine": self.engine,
            "data": self.data,
            "created": self.created,
            "wellhead": self.version,
        }

    def write(self, paths: RunPaths) -> None:
        """Durable before return. `check` is the hash of everything else, so that `verify` sees a flipped bit."""
        value = self.to_json()
        value["check"] = sample_id(canonical_json(value))
        write_atomic(paths.manifest, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    @classmethod
    def read(cls, paths: RunPaths) -> Manifest:
        """UsageError if there is no run here, StoreDamaged if run.json is not what was written."""
        try:
            text = paths.manifest.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{paths.root} holds no run: there is no {paths.manifest.name} in it",
                "name the folder that `wellhead extract --out` was given",
            ) from None
        except OSError as error:
            raise StoreDamaged(f"{paths.manifest} cannot be read: {error}", "is the disk well?") from error
        damaged = StoreDamaged(
            f"{paths.manifest} is not what wellhead wrote",
            "restore it from a copy of the run; the states themselves do not depend on it",
        )
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or "schema" not in value:
                raise damaged
            if value["schema"] != SCHEMA_VERSION:
                raise OtherSpec(
                    f"{paths.manifest} has schema version {value['schema']}; this wellhead reads {SCHEMA_VERSION}",
                    "use the wellhead version that made the run",
                )
            check = value.pop("check", None)
            if check != sample_id(canonical_json(value)):
                raise damaged
            return cls(
                CaptureSpec.from_json(value["spec"]),
                tuple(value["layers"]),
                value["model_path"],
                value["engine"],
                value["data"],
                value["created"],
                value["wellhead"],
            )
        except (ValueError, KeyError, TypeError):
            raise damaged from None


def require_same_spec(manifest: Manifest, asked: CaptureSpec, root: Path) -> None:
    """Raises OtherSpec naming every field that differs."""
    differences = manifest.spec.differences(asked)
    if differences:
        named = "; ".join(f"{field}: the run has {ours!r}, asked for {theirs!r}" for field, ours, theirs in differences)
        raise OtherSpec(
            f"{root} belongs to another capture spec: {named}",
            "use another --out for the new spec, or ask for what the run has",
        )
