"""A command's process: how it starts, and how errors and Ctrl-C end it, with messages and codes.

Exit codes: 0 success; 1 failure (also of a check, such as `compare --tol`); 2 a mistake in the
input; 75 a training run that a signal ended, saved (t0repro.training.hooks.stop_on_signal); 130
interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import mmap
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro import compat, storage
from t0repro.cli.results import echo
from t0repro.errors import INSTALL_PYARROW, INSTALL_REFERENCE, OF_REFERENCE, UserError
from t0repro.progress import quiet_libtpu
from t0repro.storage.disk import disk_error
from t0repro.words import printable, remove_secrets

FAILURE, USER_ERROR, INTERRUPTED = 1, 2, 130

# What the core tier, or `pip install t0repro`, leaves out; by the module's first name.
_NOT_INSTALLED = {
    **dict.fromkeys(OF_REFERENCE, INSTALL_REFERENCE),
    **dict.fromkeys(
        ("promptsource", "rouge_score", "sacrebleu", "sklearn", "tensorboard"),
        "TIER=core bash scripts/setup.sh, in a checkout.",
    ),
    **dict.fromkeys(
        ("starlette", "uvicorn"),
        "EXTRAS=browse bash scripts/setup.sh, in a checkout, or pip install 't0repro[browse]'.",
    ),
    **dict.fromkeys(("flax", "jax", "optax", "orbax"), "pip install 't0repro[jax]'"),
    "pyarrow": INSTALL_PYARROW,
}


# Settings of JAX that change what is computed, or end it with an error, and their defaults.
_FIXED_SETTINGS = {
    "JAX_ENABLE_X64": "0",
    "JAX_DISABLE_JIT": "0",
    "JAX_DEFAULT_PRNG_IMPL": "threefry2x32",
    "JAX_THREEFRY_PARTITIONABLE": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
}


@dataclasses.dataclass
class ErrorHandling:
    """How a command handles errors; filled in once its command line is parsed.

    Attributes:
      debug: Whether to let every exception through, with its traceback.
      how_to_continue: What to tell the user after Ctrl-C.
      long_work: Whether a closed pipe (`| head`) interrupts work, and not only printing.
    """

    debug: bool = False
    how_to_continue: str = "Start the same command again."
    long_work: bool = False


@contextlib.contextmanager
def gate(command: str, *, show_unexpected: bool = False) -> Iterator[ErrorHandling]:
    """Runs a command's body; exits with a message if it fails or is interrupted.

    Args:
      command: The name to print before messages.
      show_unexpected: Whether to keep the traceback of an unexpected exception, since it may come
        hours into a run.
    """
    settings = ErrorHandling()
    # All are set before JAX is imported. By default, JAX's compilation cache keeps only programs
    # that took a second to compile, and each program that initializes parameters takes less.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    _fix_settings()
    compat.quiet_native_logs()
    quiet_libtpu()
    _print_what_has_no_code()
    _keep_secrets_out_of_tracebacks()
    # Importing TensorFlow and tracing a step create millions of long-lived objects. By default,
    # Python collects garbage after every 700 new objects, which takes a fifth of that time.
    gc.set_threshold(100_000, 50, 100)
    _deliver_swallowed_interrupts()
    try:
        _search_working_folder()
        try:
            yield settings
        finally:
            # Here, so that its errors are reported like any other. Even after an error, the
            # bucket holds what was finished.
            storage.close_copies()
    except (KeyboardInterrupt, SystemExit) as end:
        # Click and Rich end a command with sys.exit when its output can no longer be written.
        if any(isinstance(cause, BrokenPipeError) for cause in _causes(end)):
            _end_unread(command, settings)
        # sys.exit also arrives here, but is not an interruption.
        if not _was_interrupted(end):
            raise
        _end_interrupted(command, settings.how_to_continue)
    except Exception as error:
        if settings.debug:
            raise
        if any(isinstance(cause, BrokenPipeError) for cause in _causes(error)) and _is_unread():
            _end_unread(command, settings)
        if _was_interrupted(error):  # a library answered Ctrl-C with an error of its own
            _end_interrupted(command, settings.how_to_continue)
        mistake = find_user_error(error)
        if mistake is not None:
            echo(f"{command}: {mistake}", err=True)
            sys.exit(USER_ERROR)
        if show_unexpected:
            raise
        text = remove_secrets(" ".join(str(error).split())) or "no message"
        echo(f"{command}: {type(error).__name__}: {text}", err=True)
        print(f"  fix: '{command} --debug ...' shows where this happened.", file=sys.stderr)
        sys.exit(FAILURE)


def _fix_settings() -> None:
    """Keeps a seed's random numbers, and scores' bits, from depending on the user's environment."""
    for name, default in _FIXED_SETTINGS.items():
        value = os.environ.pop(name, default)
        if value.lower() not in (default, {"0": "false", "1": "true"}.get(default)):
            echo(f"note: {name}={value} is not used: commands compute with {default}", err=True)


def _print_what_has_no_code() -> None:
    """Escapes characters that the terminal's encoding lacks, rather than ending the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python does for standard error


def _search_working_folder() -> None:
    """Lets a command import the user's modules from the working folder, as `python -m` does."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "The working folder was removed.",
            where=os.environ.get("PWD"),
            fix="Go to a folder that exists: cd.",
        ) from None
    if folder not in sys.path:
        # If it came first, a checkout's folder gin/ would shadow the library.
        sys.path.append(folder)


def _keep_secrets_out_of_tracebacks() -> None:
    """Redacts the tracebacks that Python prints for uncaught exceptions, in any thread."""
    # Never restored: Python prints an exception after the command's body has ended.
    sys.excepthook = _print_traceback
    threading.excepthook = lambda ended: _print_traceback(
        ended.exc_type, ended.exc_value, ended.exc_traceback
    )


def _print_traceback(kind: Any, error: Any, frames: Any) -> None:
    if kind is not SystemExit:  # an exception of a thread, which SystemExit ends silently
        text = "".join(traceback.format_exception(kind, error, frames))
        print(printable(remove_secrets(text), keep="\n"), end="", file=sys.stderr, flush=True)


def _deliver_swallowed_interrupts() -> None:
    """Repeats a Ctrl-C that Python swallowed.

    Python runs the signal's handler wherever the program happens to be. If that is a callback of
    the garbage collector (JAX has one) or a `__del__`, Python prints the handler's exception and
    drops it, and the command would continue.
    """
    # It stays when the command ends, since errors of a checkpoint may come later; the next command
    # of this process finds it there.
    if not isinstance(sys.unraisablehook, _DeliveringHook):
        sys.unraisablehook = _DeliveringHook(sys.unraisablehook)


class _DeliveringHook:
    """Repeats an interrupt that Python swallowed; passes everything else to the previous hook."""

    def __init__(self, report: Callable[[Any], None]):
        self._report = report

    def __call__(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            # Sent a moment later, when the callback has ended, and to the main thread, so that it
            # stops waiting.
            main = threading.main_thread().ident
            threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
        else:
            self._report(unraisable)


def _end_interrupted(command: str, how_to_continue: str) -> None:
    # Without this, a second Ctrl-C while threads and files are being closed prints a traceback.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    print(f"\n{command}: interrupted.\n  fix: {how_to_continue}", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)


def _is_unread() -> bool:
    """Whether nobody reads the output any more; a pipe of another kind may have broken."""
    asked = select.poll()
    with contextlib.suppress(OSError, ValueError):  # it may be no file
        asked.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in asked.poll(0))
    return False


def _end_unread(command: str, settings: ErrorHandling) -> None:
    # Discard what is still buffered; otherwise Python complains about it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # People look at the beginning of a list with `| head`, so this is not a failure.
    if not settings.long_work:
        sys.exit(0)
    print(
        f"{command}: the program that read its output has ended.\n"
        f"  fix: {settings.how_to_continue}",
        file=sys.stderr,
    )
    sys.exit(FAILURE)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an exception; Typer turns KeyboardInterrupt into SystemExit."""
    return any(isinstance(cause, KeyboardInterrupt) for cause in _causes(error))


# tf.data wraps an exception raised in a Python function in an error of its own, whose text begins
# with the exception's, "UserError: ...", and continues with the traceback.
_WRAPPED = re.compile(r"UserError: (.*?)(?=\n+Traceback|\n\n|\Z)", re.DOTALL)


def _is_missing_device(error: BaseException) -> bool:
    """Whether JAX cannot start what JAX_PLATFORMS names."""
    if isinstance(error, AssertionError):  # what it says where a platform has no device
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and Path(frames[-1].filename).name == "xla_bridge.py"
    return isinstance(error, RuntimeError) and str(error).startswith("Unable to initialize backend")


def find_user_error(error: BaseException | None) -> str | None:
    """The message for the user about an exception; None if it is neither a mistake nor the disk.

    This is the text of the UserError that the exception is, was caused by or carries in its
    message, or an explanation of a damaged record or of a full, read-only or vanished disk.
    """
    for cause in _causes(error):
        if isinstance(cause, UserError):
            # The class's own text: gin adds to an error the address of the function that it was in.
            return UserError.__str__(cause)
        if isinstance(cause, ModuleNotFoundError):
            package = (cause.name or "").partition(".")[0]
            if package in _NOT_INSTALLED:
                what = f"This needs {package}, which is not installed."
                return str(UserError(what, fix=_NOT_INSTALLED[package]))
        if _is_missing_device(cause):
            return str(
                UserError(
                    f"JAX finds no {os.environ.get('JAX_PLATFORMS') or 'device'} here"
                    + (f": {cause}." if str(cause) else "."),
                    where="JAX_PLATFORMS",
                    fix="Unset it, and JAX takes what there is; for a GPU or TPU run"
                    " EXTRAS=gpu bash scripts/setup.sh, or EXTRAS=tpu, once.",
                )
            )
        wrapped = _WRAPPED.search(str(cause))
        if wrapped:
            return wrapped.group(1).strip()
        # By name, because this must not import TensorFlow, which defines the error.
        if type(cause).__name__ == "DataLossError":
            from t0repro.tasks.prompt_cache.provenance import explain_damaged_record

            return str(explain_damaged_record(str(cause)))
    # Only after all causes, because a UserError above the system's error says more.
    for cause in _causes(error):
        of_disk = disk_error(cause)
        if of_disk:
            return str(of_disk)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its cause, the cause of that, and so on."""
    # A chain of causes may lead back to itself.
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # __context__ covers exceptions that were raised while another was handled, without `from`.
        error = error.__cause__ or error.__context__


# ---- Huge pages for commands that compute on a CPU, on machines that zero them faster ------------

# XLA takes a step's temporaries from the system and gives them back afterward, so the system
# zeroes them again in the next step, page by page. Pages of 2 MiB instead of 4 KiB made a train
# step 10% to 30% faster on one machine and 14% slower on another (the lab log), so each start
# measures.

_VARIABLE = "GLIBC_TUNABLES"
# The system gives huge pages to those who ask for them; "[always]" needs no asking.
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ACCELERATORS = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/vfio")  # of CUDA and of TPUs
# Enough to tell the two sizes apart; the rounds below take 0.07 s at each start.
_BYTES = 32 << 20
# The fastest counts, because the first huge pages of a new virtual machine took twenty times as
# long: its host had not given it the memory yet.
_ROUNDS = 3
# Where steps took 6% to 13% less time, huge pages were zeroed 5 times as fast (the lab log).
_MUCH_FASTER = 1.5


def use_huge_pages_where_faster(arguments: Sequence[str]) -> None:
    """Starts this process again with huge pages if it may use them and zeroes them faster.

    A value of GLIBC_TUNABLES that the user has set, also an empty one, stays.

    Args:
      arguments: The command's own arguments, with which this process has to have been started; a
        program that calls the command as a function is never replaced.
    """
    count = len(arguments)
    if count == 0 or sys.orig_argv[-count:] != list(arguments):
        return
    if _VARIABLE in os.environ or not _are_offered():
        return
    ratio = _times_as_fast()
    if ratio < _MUCH_FASTER:
        return
    # Not --vocab, nor absl's -vocab.
    if any(re.match(r"-v\d?$|--?v(erbosity)?(=|$)", word) for word in arguments):
        echo(
            f"huge pages: zeroed {ratio:.1f} times as fast as small ones, so they are used"
            f" ({_VARIABLE}= turns them off)",
            err=True,
        )
    environment = {**os.environ, _VARIABLE: "glibc.malloc.hugetlb=1"}
    # glibc reads its settings only when a process starts. sys.argv lacks Python's own options.
    os.execve(sys.executable, sys.orig_argv, environment)


def _are_offered() -> bool:
    """Whether the CPU computes here, the system offers huge pages, and glibc can ask for them."""
    if sys.platform != "linux" or any(map(os.path.exists, _ACCELERATORS)):
        return False
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return (
            name == "glibc"
            # glibc can ask for huge pages since 2.35.
            and tuple(map(int, version.split(".")[:2])) >= (2, 35)
            and "[madvise]" in _MODE.read_text()
        )
    except (OSError, ValueError):  # another C library, or a system without huge pages
        return False


def _times_as_fast() -> float:
    """How much faster this machine zeroes new memory in huge pages than in small ones."""
    seconds = {huge: min(_seconds(huge) for _ in range(_ROUNDS)) for huge in (False, True)}
    return seconds[False] / seconds[True]


def _seconds(huge: bool) -> float:
    """The seconds that it takes to write to each small page of new memory."""
    # Private: for shared memory, which is Python's default, Linux has another setting.
    with mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        begun = time.perf_counter()
        memory[:: mmap.PAGESIZE] = b"\1" * (_BYTES // mmap.PAGESIZE)
        return time.perf_counter() - begun
