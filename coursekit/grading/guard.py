"""What a learner's process may not do: read answers, write outside its folder, start programs, use a network.

An answer needs none of it. `close_the_door` sets limits on memory and on the size of files, has the kernel
restrict what can be opened (landlock.py, on Linux), and installs an audit hook (PEP 578), which Python calls
before it opens a file or starts a program, and which says in words what was refused. It is a fence against
cheating and accidents, not a prison: code that is out to harm the machine belongs in a container. The mark is
safe either way, because another process computes it.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from coursekit.grading import landlock

_posixsubprocess: Any
try:
    import _posixsubprocess
except ImportError:  # Windows
    _posixsubprocess = None

MEMORY_LIMIT = 2 * 2**30  # bytes of addresses on top of what the process has when the door closes
FILE_LIMIT = 64 * 2**20  # bytes of a file that it writes

NEVER = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile"),
    *("subprocess.Popen", "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill"),
    *("os.chdir", "os.fchdir", "ctypes.dlsym", "sqlite3.connect", "resource.setrlimit", "resource.prlimit"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),  # they find the hook
}
CHANGES_FILES = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.truncate", "os.utime"),
}
# Where libraries look things up while they work. Not all of /proc/self and /dev: they lead to every file.
SYSTEM_FILES = ("/proc/self/status", "/proc/self/maps", "/proc/cpuinfo", "/proc/meminfo")
SYSTEM_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM_FOLDERS = (
    *("/sys/", "/lib/", "/lib64/", "/etc/"),
    *(f"/usr/{name}/" for name in ("lib", "lib64", "libexec", "share", "local/lib", "local/share")),
)
# Of fcntl: from which process a signal comes, and which, when a file can be read. The numbers are Linux's.
SETS_SIGNAL = frozenset((8, 10, 15))  # F_SETOWN, F_SETSIG, F_SETOWN_EX
# Open or signal without an audit event. (What C code does by itself no hook sees: that is Landlock's part.)
UNSEEN = {
    "os": ("pidfd_open", "posix_openpt"),
    "posix": ("pidfd_open", "posix_openpt"),
    "signal": ("pidfd_send_signal", "sigqueue"),
    "_signal": ("pidfd_send_signal", "sigqueue"),
    "torch": ("from_file",),
    "torch._C._VariableFunctions": ("from_file",),
    "torch.storage.UntypedStorage": ("from_file",),
    "torch._C.StorageBase": ("from_file", "_new_shared_filename_cpu"),
    "readline": ("read_history_file", "write_history_file", "append_history_file", "read_init_file"),
}


def limit_resources() -> None:
    """Bound the memory and the size of files, where the platform can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit_memory(MEMORY_LIMIT)
    _lower(resource.RLIMIT_FSIZE, FILE_LIMIT)
    _lower(resource.RLIMIT_CORE, 0)


def limit_memory(more: int) -> None:
    """Let this process have `more` bytes of addresses beyond those it has, where the platform can tell."""
    used = _address_space()
    if used is not None:
        import resource

        _lower(resource.RLIMIT_AS, used + more)


def _address_space() -> int | None:
    """Bytes of addresses in use, which RLIMIT_AS counts; None where they cannot be read."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    except (OSError, StopIteration):
        return None


def _lower(kind: int, limit: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def close_the_door(refuse: Callable[[str], None], forbidden: Sequence[str], folder: str) -> None:
    """From here on call `refuse(what)` when the process does what it may not; if that returns, an exception.

    `forbidden`: the folders of the engine and of the course, whose code answers the exercises. `folder`: the
    only one where files may be written.
    """
    if (
        not landlock.version()
    ):  # then nothing else stops C code that opens files: take_away must find it loaded
        for name in ("torch", "readline"):
            with suppress(ImportError):
                import_module(name)
    limit_resources()
    # What `subprocess` and `multiprocessing` start programs with; the hook does not see this one.
    if _posixsubprocess is not None:
        _posixsubprocess.fork_exec = lambda *args: refuse("starts a program")
    forbidden, folder = [os.path.realpath(path) for path in forbidden], os.path.realpath(folder)
    # Virtual environments often lie inside the folder of a project, so what may be read is listed.
    own = {sys.prefix, sys.base_prefix} - {"/", "/usr", "/usr/local"}
    own |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    readable = [*SYSTEM_FOLDERS, *own, *map(os.path.realpath, own)]
    # Libraries that look at the stack read the sources on it, ours among them: no answer is in those.
    own_files = [
        os.path.join(os.path.dirname(__file__), name)
        for name in ("worker.py", "guard.py", "wire.py", "cell.py")
    ]
    files = [*own_files, *SYSTEM_FILES, *SYSTEM_DEVICES]
    judge = make_judge(readable, files, forbidden, folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        what = judge(event, args)
        if what:
            try:
                refuse(what)
            finally:
                raise PermissionError(what)

    for where, names in UNSEEN.items():
        take_away(where, names, refuse)
    sys.path[:] = [path for path in sys.path if not judge("open", (path + os.sep, None, 0))]
    landlock.restrict([*readable, *files], [folder, os.devnull], forbidden)
    sys.addaudithook(hook)


def take_away(where: str, names: Sequence[str], refuse: Callable[[str], None]) -> None:
    """Functions of a loaded module or class, as in "torch.storage.UntypedStorage", refuse from now on."""
    module, _, rest = where.partition(".")
    owner = sys.modules.get(module)
    if where == "readline" and owner is None:
        sys.modules["readline"] = None  # type: ignore[assignment]  # cannot be imported any more
        return
    for part in filter(None, rest.split(".")):
        owner = getattr(owner, part, None)
    for name in names:
        if hasattr(owner, name):
            with suppress(TypeError, AttributeError):  # a type that is written in C
                setattr(owner, name, lambda *args, name=name, **more: refuse(f"calls {where}.{name}"))


def make_judge(
    readable: list[str], files: list[str], forbidden: Sequence[str], folder: str
) -> Callable[[str, tuple[Any, ...]], str]:
    """A function of an audit event and its arguments that says what is wrong with it; "" if nothing is.

    It works in the learner's process, so it uses nothing that code there can give another meaning: no global,
    no built-in function by name, no method of an object that is not exactly a string.
    """
    sep, devnull, writes = os.sep, os.devnull, os.O_WRONLY | os.O_RDWR | os.O_CREAT
    read_from = tuple(path.rstrip(sep) + sep for path in [*readable, folder])
    own = tuple(path + sep for path in forbidden)
    packages = tuple(path for path in own if path.endswith(("minipaged" + sep, "coursekit" + sep)))
    write_to, libraries = folder + sep, sysconfig.get_path("platlib") + sep
    allowed, refused, changing = frozenset(files), frozenset(NEVER), frozenset(CHANGES_FILES)
    sets_signal = SETS_SIGNAL
    is_a, string, kinds, number, kind = isinstance, str, (str, bytes), int, type
    text_of, decode = str.__str__, bytes.decode  # a subclass may say that it is another path

    def exact(path: Any) -> str:
        if not is_a(path, kinds):
            return "no path"
        return text_of(path) if is_a(path, string) else decode(path, "utf-8", "replace")

    def absolute(path: Any) -> str:
        text = exact(path)
        return text if text.startswith(sep) else write_to + text

    def may_write(path: Any) -> bool:
        text = absolute(path)
        return (text.startswith(write_to) and ".." not in text.split(sep)) or text == devnull

    def may_read(path: Any) -> bool:
        text = absolute(path)
        if text in allowed:
            return True
        return text.startswith(read_from) and not text.startswith(own) and ".." not in text.split(sep)

    def judge(event: str, args: tuple[Any, ...]) -> str:
        if event == "open":
            path, _, flags = args
            if kind(path) is number or (may_write(path) if flags & writes else may_read(path)):
                return ""
            if absolute(path).startswith(packages):
                return "reads minipaged itself: the exercise asks you to write it"
            return f"opens {exact(path)!r}"
        if event == "ctypes.dlopen":
            return "" if absolute(args[0]).startswith(libraries) else "loads a C library"
        if event == "fcntl.fcntl" and args[1] in sets_signal:
            return "sends a signal to another process"
        if event in refused or event.startswith("socket."):
            return f"calls {event}"
        if event in changing:
            for path in args:
                if is_a(path, kinds) and not may_write(path):
                    return f"calls {event} on {exact(path)!r}"
        return ""

    return judge
