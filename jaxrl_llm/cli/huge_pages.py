"""Huge pages for the arrays of a process, on systems that give them only to those who ask.

Linux maps memory in pages of 4 KB unless it is told better. A step of training on CPUs takes and
gives back gigabytes: mapping them page by page, and looking pages up in its products, takes an
eighth of its time. glibc asks for huge pages if it is told so when a process starts, and only then.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_ASK = "glibc.malloc.hugetlb=1"
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment(given: Mapping[str, str], *, mode: Path = _MODE) -> dict[str, str] | None:
    """The environment in which a process has huge pages; None if it would change nothing.

    Args:
      given: The environment. What it says about huge pages stands.
      mode: The file that says who gets them: ``always``, ``madvise`` (who asks) or ``never``.
    """
    said = given.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in said or not _knows():
        return None
    try:
        asks = "[madvise]" in mode.read_text()
    except OSError:
        return None
    return {**given, "GLIBC_TUNABLES": f"{said}:{_ASK}".lstrip(":")} if asks else None


def start_again() -> None:
    """Runs this command anew, as the same process, where that gives it huge pages."""
    wanted = environment(os.environ)
    if wanted is not None and sys.executable:
        try:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
        except OSError:  # it also works without
            return


def _knows() -> bool:
    """Whether the C library is a glibc that can ask, which is one from 2.35 on."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    except (ValueError, OSError):
        return False
