"""The fixture of the tests of `wellhead extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extract_job import Job


@pytest.fixture
def job(cli: Any, tmp_path: Path) -> Job:
    return Job(cli, tmp_path)
