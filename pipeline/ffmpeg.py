"""ffmpeg, which imageio-ffmpeg brings: a process whose pipe is fed or read, and whose failure is an error."""

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..configs.errors import NotFoundError, VideoError

_DISK_FULL = 256 - errno.ENOSPC
"""ffmpeg's status is the last byte of a negative errno; its last line may be about what followed from that."""


class FfmpegError(RuntimeError):
    """ffmpeg ended with an error; the message is the last line of its log."""


def decode(path: str | os.PathLike[str], *output: str) -> bytes:
    """Return what ffmpeg makes of each frame of a video, without dropping or doubling any.

    `output` are ffmpeg's arguments for the result. Raises as `read`.
    """
    return read(path, "-map", "0:v:0", "-fps_mode", "passthrough", *output)


def read(path: str | os.PathLike[str], *output: str) -> bytes:
    """Return what ffmpeg makes of a video file, as its arguments `output` ask.

    Raises FileNotFoundError for a missing file, ValueError for one that is no complete video.
    """
    if not os.path.exists(path):
        raise NotFoundError(f"the video {path} does not exist")
    source = ["-xerror", "-i", f"file:{os.fspath(path)}"]
    try:
        with run_ffmpeg([*source, *output, "pipe:1"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            return process.stdout.read()
    except FfmpegError as error:
        raise VideoError(f"{path} is not a complete video: {error}") from error


@contextmanager
def run_ffmpeg(
    arguments: Sequence[str], stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ffmpeg around the body, which feeds or reads its pipe; it has ended when the block is left.

    Raises FfmpegError where ffmpeg fails; kills it where the body raises.
    imageio-ffmpeg brings the program; its own writer ignores the exit status and cannot hand over the log.
    """
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=log)
        try:
            yield process
            _close_pipes(process)
            process.wait()
        finally:  # after an error or an interrupt it is still running
            process.kill()
            _close_pipes(process)
            process.wait()
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no message")
            full = f" ({os.strerror(errno.ENOSPC)})" if process.returncode == _DISK_FULL else ""
            raise FfmpegError(f"ffmpeg ended with status {process.returncode}{full}: {last.strip()}")


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # ffmpeg ended before it took everything: its status tells why
                pipe.close()
