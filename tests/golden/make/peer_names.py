"""Checks that the names of the catalog's table of peers stand in the source of a peer.

A class, a function or an option must be a word of the source, a value a quoted text of it. Nothing
is written; the exit code is 1 if a name is missing.
"""

import re
import sys
from pathlib import Path

from jaxrl_llm.recipes import catalog


def missing(peer, folder):
    """The names of a peer, of the table, that its source lacks."""
    files = [path for kind in ("py", "yaml") for path in Path(folder).rglob(f"*.{kind}")]
    source = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
    words = set(re.findall(r"\w+", source))
    quoted = set(re.findall(r"""["']([\w.+-]+)["']""", source))
    for row in catalog.PEER_NAMES:
        if row.peer != peer:
            continue
        if row.setting.startswith("--"):
            # OpenRLHF builds some of its options from a prefix.
            known = (
                row.setting in quoted or f"--{{prefix}}.{row.setting.split('.', 1)[-1]}" in source
            )
        else:
            known = set(row.setting.split(".")) <= words
        stands = row.value in quoted or row.value in ("", "True", "False")
        # verl strips a "+" from "k3+" before it compares.
        if not known or not (stands or row.value.rstrip("+") in quoted):
            yield str(row)


def main():
    lacking = False
    for argument in sys.argv[1:]:
        peer, _, folder = argument.partition("=")
        names = list(missing(peer, folder))
        count = sum(row.peer == peer for row in catalog.PEER_NAMES)
        print(f"{peer} {catalog.PEER_VERSIONS[peer]}: {count} names, missing: {names or 'none'}")
        lacking |= bool(names)
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main())
