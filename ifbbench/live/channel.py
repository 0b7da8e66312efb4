"""The way from an engine's scheduler to the process that writes its recording.

The engine's thread only puts an event into a queue, if there is room. A thread encodes it and writes it to a pipe, and
a process of its own does all the rest: lines, figures and files need no time of the engine's interpreter, and a server
that is killed leaves a directory that this process completes.
"""

import atexit
import logging
import os
import queue
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO, cast

from ifbbench.live.events import Begin, End, Event, write

MAX_EVENTS = 4096
CLOSE_S = 30.0
GATHER_S = 0.02  # to wake the thread for each event costs the engine's thread some 30 µs
NOTHING_MORE = End()
# The process is no child of the engine's: servers kill all of theirs when an engine fails, which is when a recording is
# wanted most.
START = "import os, sys\nif os.fork(): os._exit(0)\nfrom ifbbench.live.writer import main\nsys.exit(main(sys.argv[1:]))"
_log = logging.getLogger("ifbbench.live")


class Channel:
    """Sends events to a writer process, which records below `directory`. OSError if the process cannot be started.

    is_open: until the writer has ended, or the channel was closed."""

    def __init__(self, directory: Path, begin: Begin) -> None:
        self.is_open = True
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # written in C: a Queue costs some 15 µs
        self._is_ending = threading.Event()
        self._end, theirs = os.pipe()  # the writer closes its side when it ends
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,  # Ctrl+C ends the server, and the end of the server ends the writer
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(theirs)
        process.wait()
        self._pipe = cast(BinaryIO, process.stdin)
        self._thread = threading.Thread(target=self._send, name="ifbbench recorder", daemon=True)
        self._queue.put(begin)
        self._thread.start()
        atexit.register(self.close)

    def put(self, event: Event) -> bool:
        """Send an event without waiting; False, with nothing sent, if the queue is full or the writer has ended."""
        if not self.is_open or self._queue.qsize() >= MAX_EVENTS:
            return False
        self._queue.put(event)
        return True

    def abandon(self) -> None:
        """End the recording where it is, without waiting for the writer."""
        self.is_open = False
        self._queue.put(None)
        self._is_ending.set()

    def close(self, end: End = NOTHING_MORE) -> None:
        """Send what is in the queue and `end`, and wait until the writer has completed its files."""
        if self._thread.is_alive():
            self._queue.put(end)
            self._queue.put(None)
            self._is_ending.set()
            self._thread.join(CLOSE_S)
        self.is_open = False
        if not select.select([self._end], [], [], CLOSE_S)[0]:
            _log.warning("the recording was not completed within %g s after the end of the server", CLOSE_S)

    def _send(self) -> None:
        pipe = self._pipe
        try:
            while (event := self._queue.get()) is not None:
                write(pipe, event)
                if self._queue.empty():
                    pipe.flush()
                    self._is_ending.wait(GATHER_S)
            pipe.close()
        except OSError:
            # The writer has printed why it ended.
            _log.warning("the recorder has ended; the server goes on without a recording")
        self.is_open = False
