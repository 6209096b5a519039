"""Run a Python command line in this process as ``python`` itself would: as ``__main__``, to a normal exit."""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import io
import os
import random
import signal
import sys
import types
import zipimport
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any, NoReturn

from lightning_ft.supervision.command import start_here
from lightning_ft.supervision.last_words import report_uncaught


def restore_signals() -> None:
    """Give every signal that Python code of this process handles its default handling back."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def take_place(env: Mapping[str, str], cwd: str, stdio: Sequence[int]) -> None:
    """Give a freshly forked process its own environment, directory, standard streams and randomness.

    Args:
        env: The new environment.
        cwd: The new working directory.
        stdio: Descriptors for stdin, stdout and stderr.

    """
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    os.chdir(cwd)
    start_here()
    if not sys.flags.ignore_environment:
        old, new = (path.split(os.pathsep) if path else [] for path in map(_import_path, (os.environ, env)))
        sys.path[1:] = [*new, *(path for path in sys.path[1:] if path not in old)]
    os.environ.clear()
    os.environ.update(env)
    # The stream objects stay: log handlers that were made during the imports hold them.
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # A started process draws these from the system; forked ones would all draw the same.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _import_path(env: Mapping[str, str]) -> str:
    return env.get("PYTHONPATH", "")


def run(program: Sequence[str], flags: Sequence[str] = ()) -> NoReturn:
    """Run ``program`` as ``__main__`` and end this process as the interpreter would: threads joined, atexit called.

    Args:
        program: ``["script.py", ...]``, ``["-m", "module", ...]`` or ``["-c", "code", ...]``.
        flags: Interpreter flags of the command line, for ``sys.orig_argv``.

    """
    report_uncaught()
    sys.orig_argv = [sys.executable, *flags, *program]
    # Py_Exit and not sys.exit: nothing of whoever called us may see an exception, or run again.
    ctypes.pythonapi.Py_Exit(_run(program))
    raise AssertionError("Py_Exit returned")


def set_import_path(program: Sequence[str]) -> None:
    """Make the first entry of ``sys.path`` what ``python`` would for ``program``, instead of that of ``-m``."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return
    if program[0] == "-m":
        first = os.getcwd()
    elif program[0] == "-c":
        first = ""
    elif os.path.isdir(program[0]) or _is_archive(program[0]):
        first = program[0]
    else:
        first = os.path.dirname(os.path.realpath(program[0]))
    sys.path[0] = first


def _run(program: Sequence[str]) -> int:
    try:
        _execute(program)
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    if sys.stderr is not None:
        sys.stderr.write(f"{code}\n")
    return 1


def _execute(program: Sequence[str]) -> None:
    kind, *arguments = program
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    set_import_path(program)
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        code = compile(arguments[0], "<string>", "exec")
    elif kind == "-m":
        sys.argv = ["-m", *arguments[1:]]
        spec, code = _find_module(arguments[0])
        sys.argv[0] = _adopt(main, spec)
    elif os.path.isdir(kind) or _is_archive(kind):
        sys.argv = [kind, *arguments]
        spec, code = _find_module("__main__")
        _adopt(main, spec)
    else:
        sys.argv = [kind, *arguments]
        path = os.path.abspath(kind)
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def _is_archive(path: str) -> bool:
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _find_module(name: str) -> tuple[ModuleSpec, types.CodeType]:
    spec = importlib.util.find_spec(name) if name != "__main__" else _find_archived_main()
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None  # archives' loaders have it, too
    if spec is None or get_code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    if spec.submodule_search_locations is not None:
        return _find_module(f"{name}.__main__")
    code = get_code(spec.name)
    if code is None:
        raise SystemExit(f"{sys.executable}: No code object available for {name}")
    return spec, code


def _find_archived_main() -> ModuleSpec | None:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec("__main__", sys.path[:1])


def _adopt(main: types.ModuleType, spec: ModuleSpec) -> str:
    """Give ``main`` the attributes that ``-m`` gives it; return its file."""
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    return spec.origin or spec.name
