"""Triton Inference Server as a process: where it is, how it is started, and how it ends."""

import ctypes
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.clock import WallClock
from ifbbench.errors import IfbbenchError, InputError, RunFailed
from ifbbench.models.named_models import load_model_config
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.rundir import run_directory
from ifbbench.serving.triton_repository import FIFO_VARIABLE, PIPE_VARIABLE, TritonConfig, write_repository
from ifbbench.settings.config import RunConfig

LOG = "triton.log"
INSTALL = "pip install 'ifbbench[triton]'"
POLL_S = 0.1
# After the drain, how long Triton may take to end, and then the process of the model to complete the recording.
END_S, COMPLETE_S = 1.0, 60.0
PR_SET_PDEATHSIG = 1
# In place of Triton's exit status.
MODEL_DIED = -1000
LOAD_ERROR = re.compile(r"\"failed to load '.*?' version \d+: \w+(?: \w+)*: (?:TritonModelException: )?(.*)\"$")


def serve_triton(
    config: RunConfig,
    triton: TritonConfig,
    progress: Progress = NO_PROGRESS,
    on_started: Callable[[TritonConfig], None] = lambda triton: None,
) -> dict[str, Any] | None:
    """Serve until SIGTERM or SIGINT, then drain; returns the summary of the recording, None without one. To be called
    in the main thread.

    on_started: is called with the settings, and the ports that were chosen, when requests are taken. InputError if the
    settings are bad, a port is taken, or no Triton is installed."""
    with reserved_ports(triton) as triton, TemporaryDirectory(prefix="ifbbench-triton-") as directory:
        load_model_config(config.model)
        if triton.record is not None:
            run_directory.check(Path(triton.record), config.overwrite)
        work = Path(directory)
        write_repository(work / "models", config, triton)
        command, environment = triton_command(work, config, triton)
        progress.stage("starting Triton")
        # The model's process reads `held`, and completes the recording when this process closes `alive` or dies.
        held, alive = os.pipe()
        # It keeps this one open, which hangs up when it dies. Triton itself would start it again.
        os.mkfifo(fifo := work / "model")
        model = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        variables = {PIPE_VARIABLE: str(held), FIFO_VARIABLE: str(fifo)}
        process = subprocess.Popen(
            command, env=environment | variables, pass_fds=(held,), start_new_session=True, preexec_fn=_end_with_parent
        )
        os.close(held)
        try:
            with _ending_by_signals(process) as ending:
                if _wait_until_ready(process, triton, ending):
                    on_started(triton)
                status = _wait_until_ended(process, triton, ending, alive, model)
            reason = _written(model)
        finally:
            os.close(model)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status and not ending:
            raise _failure(status, reason, work / LOG, triton)
    return None if triton.record is None else _summary(Path(triton.record))


def triton_command(work: Path, config: RunConfig, triton: TritonConfig) -> tuple[list[str], dict[str, str]]:
    """The command that starts Triton with the models in `work`, and its environment. InputError if it is not
    installed."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise InputError(
            f"Triton Inference Server is not installed; {INSTALL} installs it (package nvidia-pytriton, "
            "Linux on x86-64)."
        )
    package = Path(spec.origin).parent
    server, libraries = package / "tritonserver", package.parent / "nvidia_pytriton.libs"
    backend = work / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (*(server / "backends" / "python").glob("*.*"), _stub(server)):
        (backend / file.name).symlink_to(file)
    # DCGM complains on stderr where there is no driver.
    has_gpu = not config.makes_no_tokens and config.device != "cpu" and Path("/proc/driver/nvidia").exists()
    options: dict[str, Any] = {
        "model-repository": work / "models",
        "backend-directory": backend.parent,
        "log-file": work / LOG,
        "disable-auto-complete-config": "",
        "exit-timeout-secs": round(triton.drain_timeout),
        "http-address": triton.host,
        "http-port": triton.http_port,
        "grpc-address": triton.host,
        "grpc-port": triton.grpc_port,
        "metrics-address": triton.host,
        "metrics-port": triton.metrics_port,
        "allow-gpu-metrics": str(has_gpu).lower(),
        "metrics-config": "histogram_latencies=true",
        "metrics-interval-ms": triton.stats_check_period_ms,
    }
    command = [str(server / "bin" / "tritonserver")]
    command += [f"--{name}={value}" if value != "" else f"--{name}" for name, value in options.items()]
    paths = [str(_library_folder()), str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    # Triton's interpreter takes the packages of the python3 that it finds first.
    search = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return command, os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(search),
    }


def _stub(server: Path) -> Path:
    """The program that embeds this version of Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise InputError(
            f"this nvidia-pytriton has no backend for Python {version}; it has {known}. Install another "
            "version of it, or of Python."
        )
    return stub


def _library_folder() -> Path:
    """The folder of libpython, which the stub loads."""
    names = sysconfig.get_config_vars()
    library = names.get("INSTSONAME") or ""
    folders = [Path(sys.base_prefix) / "lib", Path(names.get("LIBDIR") or "/")]
    folders += [folder / (names.get("MULTIARCH") or "") for folder in folders]
    for folder in folders:
        if library.startswith("libpython") and ".so" in library and (folder / library).is_file():
            return folder
    raise InputError(
        f"{sys.executable} has no shared library libpython, which Triton's Python backend needs; use a "
        "Python that was built with --enable-shared, as those of distributions, conda and uv are."
    )


@contextmanager
def reserved_ports(triton: TritonConfig) -> Iterator[TritonConfig]:
    """`triton` with ports instead of 0. InputError if one is taken, or named twice.

    Until the end of the block, sockets that do not listen are bound to the ports. Triton's sockets may be bound beside
    them, as all have SO_REUSEADDR, and the kernel gives the ports to no program that asks for a free one."""
    chosen: dict[str, Any] = {}
    names = ("http_port", "grpc_port", "metrics_port")
    with ExitStack() as sockets:
        for name in sorted(names, key=lambda name: not getattr(triton, name)):  # free ones differ from those given
            port = getattr(triton, name)
            if port and port in chosen.values():
                raise InputError(f"--{name}: {port} is also that of another protocol; give another --{name}.")
            bound = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in triton.host else socket.AF_INET))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind((triton.host, port))
            except OSError as error:
                raise InputError(
                    f"--{name}: {triton.host}:{port} cannot be listened on ({error.strerror}); give "
                    f"another --{name} or --host."
                ) from error
            chosen[name] = bound.getsockname()[1]
        yield replace(triton, **chosen)


def _end_with_parent() -> None:
    """Let the process end when this one is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _ending_by_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """SIGTERM and SIGINT end Triton, which then drains; another one ends the drain. Yields those that have arrived."""
    arrived: list[int] = []

    def end(number: int, frame: object) -> None:
        process.send_signal(signal.SIGKILL if arrived else signal.SIGTERM)
        arrived.append(number)

    previous = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield arrived
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)


def _wait_until_ready(process: subprocess.Popen[bytes], triton: TritonConfig, ending: list[int]) -> bool:
    """Whether the model is ready, or else Triton has ended or is to."""
    clock = WallClock()
    while process.poll() is None and not ending:
        try:
            urllib.request.urlopen(f"{address(triton)}/v2/models/{triton.triton_model_name}/ready", timeout=1).close()
            return True
        except (urllib.error.URLError, OSError):
            clock.wait_until(clock.now() + POLL_S)
    return False


def _wait_until_ended(
    process: subprocess.Popen[bytes], triton: TritonConfig, ending: list[int], alive: int, model: int
) -> int:
    """The exit status of Triton, or MODEL_DIED. Without a limit it would wait for streams of gRPC that clients leave
    open; so after the drain the model's process completes the recording and ends Triton.

    alive: is closed then.
    model: hangs up when that process ends.
    """
    clock, deadline, limit_s = WallClock(), math.inf, COMPLETE_S
    hung_up = select.poll()
    hung_up.register(model, 0)
    while (status := process.poll()) is None and clock.now() < deadline:
        if ending:
            deadline = min(deadline, clock.now() + triton.drain_timeout + END_S)
        elif hung_up.poll(0):
            deadline, limit_s = 0.0, END_S  # Triton has ended too, if the model has ended it
        clock.wait_until(clock.now() + POLL_S)
    os.close(alive)
    try:
        return process.wait(limit_s) if status is None else status
    except subprocess.TimeoutExpired:
        return MODEL_DIED if limit_s == END_S else -signal.SIGKILL  # as it will be


def _written(model: int) -> str:
    """What the model's process has written."""
    try:
        return os.read(model, select.PIPE_BUF * 16).decode()
    except BlockingIOError:  # nothing, and it has not ended
        return ""


def address(triton: TritonConfig) -> str:
    """Where Triton is by HTTP."""
    host = f"[{triton.host}]" if ":" in triton.host else triton.host
    return f"http://{host}:{triton.http_port}"


def _failure(status: int, reason: str, log: Path, triton: TritonConfig) -> IfbbenchError:
    """Why Triton has ended. reason: of the model, if it has ended Triton."""
    if status == MODEL_DIED:
        reason = reason or "the server ended early: the model's process in Triton has died"
    if reason:
        return RunFailed(reason, "" if triton.record is None else f"what was recorded is kept in {triton.record}")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    for line in lines:
        if found := LOAD_ERROR.search(line):
            message = json.loads(f'"{found[1]}"')
            return InputError(message.partition("\n\nAt:")[0])
    errors = [line for line in lines if line.startswith(("E", "error:"))]
    return IfbbenchError(" ".join([f"Triton ended with status {status}.", *errors[-3:]]))


def _summary(directory: Path) -> dict[str, Any] | None:
    path = directory / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
