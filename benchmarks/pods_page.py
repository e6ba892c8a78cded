"""Writes the measured part of docs/pods.md from benchmarks/results/compiled.json.

python -m benchmarks.pods_page            # write
python -m benchmarks.pods_page --check    # exit 1 if it would change anything
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "pods.md"


def measured(folder: Path = RESULTS) -> str:
    """What the compilers of TPUs and GPUs say of train steps."""
    path = folder / "compiled.json"
    if not path.exists():
        return "Nothing yet."
    result = json.loads(path.read_text())
    rows = [_row(found) for found in result["programs"].values()]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "python")
    title = f"GB of one device, by the compiler of that device ({versions}):"
    columns = ("step", "device", "state", "temporary", "of", "compiled in")
    return pages.table(title, columns, rows)


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    name = found["config"]
    if "mesh" in found:
        sizes = ", ".join(f"`{k}` {v}" for k, v in found["mesh"].items() if v > 1)
        name = f"configs/{name}, {sizes}" + (", weights gathered first" if found["options"] else "")
        name += ", layers scanned" if found.get("scan_layers") else ""
    else:
        name = f"{name}, {found['model'].split(',')[0]}, remat `{found['remat']}`"
    state, temporary, memory = (
        f"{found[key] / 1e9:.1f}" for key in ("arguments_bytes", "temporary_bytes", "memory_bytes")
    )
    return name, found["device"], state, temporary, memory, f"{found['compile_seconds']:.0f} s"


def main(argv: list[str] | None = None) -> int:
    return pages.write(PAGE, measured, "benchmarks.pods_page", argv)


if __name__ == "__main__":
    sys.exit(main())
