"""All benches, one after another: ``python -m bench``. Every number is a ratio in one run; nothing is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in {"__init__", "__main__", "timing"}:
        print(f"\n== {path.stem}", flush=True)
        subprocess.run([sys.executable, "-m", f"bench.{path.stem}"], check=False)
