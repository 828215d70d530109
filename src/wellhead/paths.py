"""Names inside a run folder. Nothing here touches the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where things are in the run folder `root`."""

    root: Path

    @property
    def manifest(self) -> Path:
        """What was asked and the CaptureSpec, written once."""
        return self.root / "run.json"

    @property
    def lock(self) -> Path:
        """Who holds the run."""
        return self.root / "run.lock"

    @property
    def plans(self) -> Path:
        return self.root / "plan"

    @property
    def current_plan(self) -> Path:
        """Names the plan file in force."""
        return self.plans / "current"

    def plan(self, number: int) -> Path:
        return self.plans / f"{number}.parquet"

    @property
    def states(self) -> Path:
        """The shards."""
        return self.root / "states"

    @property
    def writers(self) -> Path:
        """A folder for each writer's life."""
        return self.root / "writers"

    def writer(self, life_id: str) -> WriterPaths:
        return WriterPaths(self.writers / life_id)


@dataclass(frozen=True, slots=True)
class WriterPaths:
    """What one life of a process writes about itself; nobody else ever writes there."""

    root: Path

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"
