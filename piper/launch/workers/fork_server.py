"""A process that has imported what workers need, and forks them: importing torch takes seconds and
150 MB, a fork neither.

    python -m piper.launch.workers.fork_server DESCRIPTOR FOLDER

It has no thread and no GPU, so that a fork of it is sound. The descriptor is its end of a socket
over which its parent asks for workers; when the parent closes it or is killed, the workers are
killed and their folder is removed. Its standard input is a pipe that the parent holds open.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from enum import IntEnum
from multiprocessing.connection import wait
from pathlib import Path

from piper.launch.device import weight_readers  # noqa: F401 - every worker imports it
from piper.launch.workers import worker

KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MIMALLOC_PURGE_DELAY": "50",
}
"""Settings of torch's CPU allocator: it keeps memory that a step frees and allocates again. glibc
keeps allocations below 32 MiB, its largest threshold; mimalloc (as on 64-bit ARM) keeps all of them
for 50 ms."""
_MESSAGE = struct.Struct("qqq")
"""A request: its number, what is asked, and the worker, by its number. An answer: the number of the
request, the worker's process and its exit code."""
_RUNS = 256
"""Stands for the exit code of a process that has not ended."""
_NOBODY = 2**31 - 1
"""The id of a process that is not there yet; the system gives none so large."""
_BUSY = 2.0
"""Seconds to wait for an answer: a server that is stopped gives none."""


class _Ask(IntEnum):
    FORK = 0
    """Fork a worker; its end of the connection to the parent comes along."""
    STATUS = 1
    KILL = 2


class ForkedProcess:
    """A worker process, with the interface of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server = server
        self._number = number
        self._pid = _NOBODY
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._told(_Ask.STATUS)

    def kill(self) -> None:
        self._told(_Ask.KILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and deadline < time.monotonic():
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(0.005)
        return code

    def _told(self, what: _Ask) -> int | None:
        if self.returncode is None and (answer := self._server.ask(what, self._number)) is not None:
            self._pid, code = answer
            self.returncode = None if code == _RUNS else code
        return self.returncode


class ForkServer:
    """The parent's handle of a fork server, which starts at the first fork. If it is lost, its
    workers count as ended like it, and the next fork starts another one."""

    def __init__(self, folder: Path) -> None:
        """The workers share ``folder``."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._asked = 0
        self._workers: set[int] = set()
        """The workers of the present process, by the number of the request for each."""
        self._ready = False
        """Whether it serves. Until then it imports."""
        self._code = -signal.SIGKILL.value
        """The exit code of workers that have lost their server."""

    def fork(self, descriptor: int) -> ForkedProcess:
        """A worker that talks to this process over ``descriptor``. It need not be there yet."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._process = self._started()
            self._asked += 1
            message = _MESSAGE.pack(self._asked, _Ask.FORK, self._asked)
            with contextlib.suppress(OSError):  # its status then says that it has ended
                self._socket.settimeout(None)  # while the server imports, few messages have room
                socket.send_fds(self._socket, [message], [descriptor])
                self._workers.add(self._asked)
            self._socket.settimeout(_BUSY)
            return ForkedProcess(self, self._asked)

    def ask(self, what: _Ask, number: int) -> tuple[int, int] | None:
        """The process of a worker and its exit code; None if the server does not answer yet."""
        with self._lock:
            if number not in self._workers:
                return _NOBODY, self._code
            self._ready = self._ready or bool(wait([self._socket], timeout=0))
            if what is _Ask.STATUS and not self._ready:
                return None
            self._asked += 1
            try:
                self._socket.sendall(_MESSAGE.pack(self._asked, what, number))
                request = pid = code = 0
                while request != self._asked:  # an earlier call may not have waited for its answer
                    if not (content := self._socket.recv(_MESSAGE.size)):
                        raise ConnectionError
                    request, pid, code = _MESSAGE.unpack(content)
            except TimeoutError:
                return None
            except OSError:
                self._end()
                return _NOBODY, self._code
            return pid, code

    def close(self) -> None:
        """Kill all workers."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if sys.platform == "linux":
            for name, value in KEEPING.items():
                environment.setdefault(name, value)
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._socket, there = socket.socketpair()
        with there:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(there.fileno()), str(self._folder)],
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=[there.fileno()],
                start_new_session=True,  # only the caller receives Ctrl-C
            )

    def _end(self) -> None:
        self._workers.clear()
        self._ready = False
        if self._process is None:
            return
        self._socket.close()
        self._process.terminate()  # ends it if it still imports; otherwise it ends its workers
        try:
            self._process.wait(5 * _BUSY)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()  # workers that have lost their server end now
        self._code = self._process.returncode or -signal.SIGKILL
        self._process = None


def main(descriptor: int, folder: Path) -> None:
    """Serve until the parent is gone or closes its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()  # collections in the workers must not copy what they share
    pids: dict[int, int] = {}
    codes: dict[int, int] = {}
    try:
        with socket.socket(fileno=descriptor) as parent, contextlib.suppress(ConnectionError):
            parent.sendall(_MESSAGE.pack(0, 0, 0))
            _serve(parent, folder, pids, codes)
    finally:
        left = [pid for number, pid in pids.items() if number not in codes]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _serve(
    parent: socket.socket, folder: Path, pids: dict[int, int], codes: dict[int, int]
) -> None:
    """Answer requests, and note the processes of the workers and the exit codes of the ended."""
    while True:
        content, given, _, _ = socket.recv_fds(parent, _MESSAGE.size, 1)
        if not content:
            return
        request, what, number = _MESSAGE.unpack(content)
        if what == _Ask.FORK:
            pids[number] = _forked(parent, given[0], folder)
            continue
        if number not in codes:
            if what == _Ask.KILL:
                os.kill(pids[number], signal.SIGKILL)
            ended, status = os.waitpid(pids[number], os.WNOHANG)
            if ended:
                codes[number] = os.waitstatus_to_exitcode(status)
        parent.sendall(_MESSAGE.pack(request, pids[number], codes.get(number, _RUNS)))


def _forked(parent: socket.socket, descriptor: int, folder: Path) -> int:
    """The process of a new worker."""
    pid = os.fork()
    if pid == 0:
        try:
            parent.close()
            worker.main(descriptor, folder)
        except BaseException:  # noqa: BLE001 - the worker must not go on as a server
            traceback.print_exc()
        os._exit(1)
    os.close(descriptor)
    return pid


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
