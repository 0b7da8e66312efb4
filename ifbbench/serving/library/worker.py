"""The worker thread of a batch manager. It ends with the manager, or with the program; a fork does not have it."""

import atexit
import os
import threading
from collections.abc import Callable
from weakref import WeakMethod

from ifbbench.engine.interfaces import Executor
from ifbbench.engine.loop import TokenGenerationLoop

# A program that ends without close() waits so long for the iteration in flight.
EXIT_TIMEOUT_S = 5.0

_running: "set[Worker]" = set()


class Worker:
    """Calls `turn` until it returns None, and `wait` after each turn that had nothing to do (False); `fail` with what
    `wait` raises, and then it ends.

    turn, fail: methods of the manager, which the thread holds during a call only: once the manager is deleted, `loop`
        is aborted, `owned_executor` closed, and the thread ends.
    aborting, wake: set when the next turn is to be the last one.
    """

    def __init__(
        self,
        turn: Callable[[], bool | None],
        wait: Callable[[], object],
        fail: Callable[[BaseException], None],
        loop: TokenGenerationLoop,
        owned_executor: Executor | None,
        aborting: threading.Event,
        wake: threading.Event,
    ) -> None:
        self.is_forked = False
        self._loop, self._owned_executor, self._aborting, self._wake = loop, owned_executor, aborting, wake
        # Not `Thread.join`: if Ctrl-C interrupts it, Python up to 3.12 takes the thread, which runs on, to have ended.
        self._ended = threading.Event()
        # A daemon thread does not keep a program running that forgets to close the manager.
        self._thread = threading.Thread(
            target=self._run,
            args=(WeakMethod(turn), wait, WeakMethod(fail)),
            name="ifbbench-batch-manager",
            daemon=True,
        )
        _running.add(self)
        self._thread.start()
        # Python would stop it in the middle of an iteration, upon which PyTorch aborts the process.
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this thread."""
        return self._thread is threading.current_thread()

    def join(self) -> None:
        """Wait until the thread has ended. Can be interrupted, and called again."""
        self._ended.wait()
        self._thread.join()

    def end(self) -> None:
        """End soon, because the program ends."""
        self._aborting.set()
        self._wake.set()
        self._ended.wait(EXIT_TIMEOUT_S)

    def _run(
        self,
        turn_of: "WeakMethod[Callable[[], bool | None]]",
        wait: Callable[[], object],
        fail_of: "WeakMethod[Callable[[BaseException], None]]",
    ) -> None:
        try:
            while (turn := turn_of()) is not None:
                worked = turn()
                del turn
                if worked is None:
                    return
                if not worked:
                    try:
                        wait()
                    except BaseException as error:
                        if (fail := fail_of()) is not None:
                            fail(error)
                        return
            self._loop.abort("the batch manager was deleted without close()")
            if self._owned_executor is not None:
                self._owned_executor.close()
        finally:
            _running.discard(self)
            self._ended.set()


def _end_all() -> None:
    for worker in list(_running):
        worker.end()


def _forget_all() -> None:
    """In a forked process, which has none of the threads."""
    for worker in _running:
        worker.is_forked = True
    _running.clear()


os.register_at_fork(after_in_child=_forget_all)
