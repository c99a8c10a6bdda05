"""What a learner's process may not do: read answers, write outside its folder, start programs, use a network.

An answer needs none of it. `close_the_door` installs an audit hook (PEP 578), which Python calls before it
opens a file, imports a module or starts a program, and limits on memory and file size. A hook cannot be taken
out again. It is a fence against cheating and accidents, not a prison: code that is out to harm the machine
belongs in a container. The mark is safe either way, because another process computes it.
"""

import ctypes  # noqa: F401  loads itself as a library when it is first imported
import os
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

_posixsubprocess: Any
try:
    import _posixsubprocess
except ImportError:  # Windows
    _posixsubprocess = None

MEMORY_LIMIT = 2 * 2**30  # bytes on top of what the process has when the door closes
FILE_LIMIT = 64 * 2**20  # bytes of a file that it writes

STARTS_OR_SIGNALS = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile"),
    *("subprocess.Popen", "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill"),
    *("os.chdir", "os.fchdir", "ctypes.dlsym"),
}
CHANGES_FILES = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.truncate", "os.utime"),
}
# Where libraries look things up while they work. Not all of /proc/self and /dev: they lead to every file.
SYSTEM_FILES = ("/proc/self/status", "/proc/self/maps", "/proc/cpuinfo", "/proc/meminfo")
SYSTEM_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM_FOLDERS = ("/sys/", "/usr/", "/lib/", "/lib64/", "/etc/")


def limit_resources() -> None:
    """Bound the memory and the size of files, where the platform can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = _data_bytes()
    if used is not None:
        _lower(resource.RLIMIT_DATA, used + MEMORY_LIMIT)
    _lower(resource.RLIMIT_FSIZE, FILE_LIMIT)
    _lower(resource.RLIMIT_CORE, 0)


def _data_bytes() -> int | None:
    """Private memory of this process, which RLIMIT_DATA counts; None where it cannot be read."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return None


def _lower(kind: int, limit: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def close_the_door(refuse: Callable[[str], None], forbidden: str, folder: str) -> None:
    """From here on call `refuse(what)`, which must not return, when the process does what it may not.

    `forbidden`: the folder of the minipaged package, whose code answers the exercises. `folder`: the only one
    where files may be written.
    """
    limit_resources()
    # What `subprocess` and `multiprocessing` start programs with; the hook does not see this one.
    if _posixsubprocess is not None:
        _posixsubprocess.fork_exec = lambda *args: refuse("starts a program")
    forbidden, folder = os.path.realpath(forbidden) + os.sep, os.path.realpath(folder) + os.sep
    # Virtual environments often lie inside the folder of a project, so what may be read is listed.
    readable = tuple({os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix)})
    readable += tuple({path + os.sep for path in (sys.prefix, sys.base_prefix)}) + SYSTEM_FOLDERS

    # Libraries that look at the stack read the sources on it, ours among them: no answer is in those.
    own_files = [
        os.path.join(os.path.dirname(__file__), name) for name in ("worker.py", "guard.py", "wire.py")
    ]
    libraries = sysconfig.get_path("platlib") + os.sep  # torch and numpy load parts of themselves

    def absolute(path: Any) -> str:
        text = path.decode(errors="replace") if isinstance(path, bytes) else str(path)
        return text if text.startswith(os.sep) else folder + text

    def may_read(path: Any) -> bool:
        text = absolute(path)
        if text in own_files:
            return True
        if ".." in text.split(os.sep) or text.startswith(forbidden):
            return False
        return text.startswith((folder, *readable)) or text in SYSTEM_FILES + SYSTEM_DEVICES

    def may_write(path: Any) -> bool:
        text = absolute(path)
        return ".." not in text.split(os.sep) and (text.startswith(folder) or text == os.devnull)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if isinstance(path, int) or (may_write(path) if writes else may_read(path)):
                return
            inside = absolute(path).startswith(forbidden)
            refuse(
                "reads minipaged itself: the exercise asks you to write it" if inside else f"opens {path!r}"
            )
        elif event == "ctypes.dlopen":
            if not str(args[0]).startswith(libraries):
                refuse(f"loads the C library {args[0]!r}")
        elif event in STARTS_OR_SIGNALS or event.startswith("socket."):
            refuse(f"calls {event}")
        elif event in CHANGES_FILES and not all(may_write(path) for path in args if isinstance(path, str)):
            refuse(f"calls {event}({args[0]!r})")

    sys.path[:] = [path for path in sys.path if may_read(path + os.sep)]  # not the repository
    sys.addaudithook(hook)
