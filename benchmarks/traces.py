"""Where the shared traces are: beside the repository, or where CONCERTINA_TRACES says."""

from __future__ import annotations

import os
from pathlib import Path

TRACES = Path(os.environ.get("CONCERTINA_TRACES") or Path(__file__).parents[2] / "shared" / "traces")
