"""Child processes for tests, started by exec (never forked after ZeroMQ has threads), and what they leave behind."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]


class Child:
    """A Python program that talks by lines: it prints, and reads orders from its standard input."""

    def __init__(self, code: str, *args: object, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, seconds: float = 20.0) -> str:
        """What it prints next, without the end of line."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], seconds)[0], "the child said nothing"
        return self.process.stdout.readline().rstrip("\n")

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Suspends it, and returns when it is suspended."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.returncode is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def num_fds(pid: int | None = None) -> int:
    return len(os.listdir(f"/proc/{pid or 'self'}/fd"))


def num_ring_maps(pid: int | None = None) -> int:
    """Step rings mapped into a process."""
    return Path(f"/proc/{pid or 'self'}/maps").read_text().count("memfd:bouquet-step-ring")


def num_ring_fds(pid: int | None = None) -> int:
    """Descriptors of step rings open in a process."""
    folder = Path(f"/proc/{pid or 'self'}/fd")
    return sum("memfd:bouquet-step-ring" in str(link.readlink()) for link in folder.iterdir() if link.is_symlink())
