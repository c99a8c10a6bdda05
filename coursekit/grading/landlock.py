"""Linux's own fence around a process (Landlock, from Linux 5.13 on), whatever language opens the file.

The kernel's calls have no Python names: numbers and structures are those of linux/landlock.h, the same on
every processor. Documentation: https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls
PR_SET_NO_NEW_PRIVS = 38
PATH_BENEATH = 1

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
# Rights on files that a version of Landlock knows; running programs (bit 0) is one that nothing here grants.
FILE_RIGHTS = {1: 2**13 - 1, 2: 2**14 - 1, 3: 2**15 - 1, 5: 2**16 - 1}
NETWORK_RIGHTS = 2**2 - 1  # bind and connect TCP, from version 4 on
SCOPES = 2**2 - 1  # abstract sockets and signals reach only the process itself, from version 6 on


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """The version of Landlock that this kernel has; 0 without one, and on other systems."""
    return max(0, _call(CREATE_RULESET, None, 0, 1)) if sys.platform == "linux" else 0


def restrict(readable: Iterable[str], writable: Iterable[str], forbidden: Sequence[str]) -> bool:
    """From here on this thread, and those it starts, open only what is in `readable` and `writable`.

    Paths are folders or files; those that do not exist are left out. Nothing in a folder of `forbidden` can
    be read, also where it lies in a readable one. No program can be started, no TCP connection made and no
    other process signalled, as far as this kernel knows how. It cannot be undone. Returns whether it is in
    force.
    """
    known = version()
    if not known:
        return False
    rights = FILE_RIGHTS[max(number for number in FILE_RIGHTS if number <= known)]
    ruleset = _Ruleset(rights, NETWORK_RIGHTS if known >= 4 else 0, SCOPES if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    handle = _call(CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    if handle < 0:
        return False
    for root in readable:
        for path, right in _without(os.path.realpath(root), forbidden):
            _allow(handle, path, right & rights)
    for path in writable:
        _allow(handle, path, rights & ~1)
    _library().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_restricted = _call(RESTRICT_SELF, handle, 0) == 0
    os.close(handle)
    return is_restricted


def _without(root: str, forbidden: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Rights that make `root` readable, less what is in `forbidden`: they add up, none can be taken away."""
    if root in forbidden:
        return
    if not any(path.startswith(root.rstrip(os.sep) + os.sep) for path in forbidden):
        yield root, READ_FILE | READ_DIR
        return
    yield root, READ_DIR  # so that modules beside it are found
    for name in os.listdir(root):
        yield from _without(os.path.join(root, name), forbidden)


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= WRITE_FILE | READ_FILE | TRUNCATE
        rule = _PathBeneath(rights, parent)
        _call(ADD_RULE, handle, PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    """A system call by its number; -1 when it fails."""
    return int(_library().syscall(ctypes.c_long(number), *arguments))
