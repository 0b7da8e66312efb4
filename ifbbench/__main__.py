"""The `ifbbench` command, and `python -m ifbbench`: the signals that end it, before anything else is imported."""

import gc
import io
import os
import signal
import sys
from types import FrameType

IMPORTS = "<frozen importlib._bootstrap>"
RETRY_S = 0.02
# Imports make tens of thousands of objects that stay. With Python's threshold of 700, collections look at them for a
# twentieth of the time that a short run takes.
YOUNG_OBJECTS = 10_000
INTERRUPTED = 130


def main() -> None:
    """Run the command. Ctrl-C and SIGTERM end it with status 130; a run keeps its results."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller; a file of the run would get its number and the output
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file that is not UTF-8 gets ? for what it lacks
            stream.reconfigure(errors="replace")
    os.environ["MPLBACKEND"] = "Agg"  # charts are files, whatever the environment shows plots in
    # NumPy's OpenBLAS starts a thread for each further core, which spins for 2**26 cycles before it sleeps, 0.03 to
    # 0.08 s of processor time a core; most commands never use these threads. With this they sleep after 2**4 cycles.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    gc.set_threshold(YOUNG_OBJECTS)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell ignores Ctrl-C for its background jobs
            signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        from ifbbench.cli.main import main as command

        command(prog_name="ifbbench")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # the process ends: a last collection would look at all objects of all libraries
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; after an import, because in it the interrupt could be lost or become another error."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTS:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
