"""Export on a full disk, with an encoder that fails or lies: an error, and nothing is left, whatever the codec."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kandinsky5_nabla.configs.errors import WriteError
from kandinsky5_nabla.pipeline.codecs import CODECS
from kandinsky5_nabla.pipeline.export import export_video, read_comment

NOISE = np.random.default_rng(0).integers(0, 256, (9, 128, 128, 3), np.uint8)

on_posix = pytest.mark.skipif(os.name != "posix", reason="the wrapper is a shell script, the limit is POSIX's")
each_file_codec = pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.encoder])


def export(frames, folder, codec, **arguments):
    return export_video(frames, folder / f"video{CODECS[codec].suffix}", codec=codec, **arguments)


@contextmanager
def no_file_larger_than(size) -> Iterator[None]:
    """A limit on the size of files stands for a full disk: writing fails in the middle of a file, here and in ffmpeg.

    Python ignores the signal that comes with it; ffmpeg is started with the signal's default, and dies of it.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def use_ffmpeg_wrapper(tmp_path, monkeypatch):
    """Return what puts a shell script before ffmpeg, whose path is $ffmpeg, and gives an empty folder for the output.

    In the script $output is the file that ffmpeg is to write; where it reads there is no such file.
    """
    import imageio_ffmpeg

    real = imageio_ffmpeg.get_ffmpeg_exe()

    def install(script):
        wrapper = tmp_path / "ffmpeg"
        head = 'for last; do :; done; output="${last#file:}"'
        wrapper.write_text(f"#!/bin/sh\nffmpeg='{real}'\n{head}\n{script}\n")
        wrapper.chmod(0o755)
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(wrapper))
        folder = tmp_path / "out"
        folder.mkdir()
        return folder

    return install


@on_posix
@pytest.mark.parametrize("codec", CODECS)
def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing(tmp_path, codec):
    with (
        no_file_larger_than(40_000),
        pytest.raises((RuntimeError, OSError), match=r"ffmpeg ended|too large"),
    ):
        export(NOISE, tmp_path, codec)
    assert list(tmp_path.iterdir()) == []


@on_posix
@each_file_codec
@pytest.mark.parametrize("size", [0, 1000, 50_000])
def test_a_disk_that_is_full_and_no_signal_is_an_error_and_leaves_nothing(use_ffmpeg_wrapper, codec, size):
    """As on a real disk: writing returns an error, which ffmpeg may take note of or not."""
    folder = use_ffmpeg_wrapper('trap \'\' XFSZ; exec "$ffmpeg" "$@"')
    with pytest.raises(RuntimeError, match=r"ffmpeg ended with status|not written completely"):  # noqa: SIM117
        with no_file_larger_than(size):
            export(NOISE, folder, codec)
    assert list(folder.iterdir()) == []


@on_posix
@pytest.mark.parametrize("codec", ["gif", "frames"])
def test_a_disk_with_no_room_for_the_last_bytes_is_an_error_and_leaves_nothing(tmp_path, codec):
    """What is not ffmpeg's: a GIF's comment, and a folder's metadata, which is larger than its only frame."""
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    written = export(frames, tmp_path, codec)
    size = max(file.stat().st_size for file in [written, *written.glob("*.png")] if file.is_file())
    other = tmp_path / "other"
    other.mkdir()
    with no_file_larger_than(size + 100), pytest.raises(OSError, match="too large"):
        export(frames, other, codec, comment="x" * 10_000)
    assert list(other.iterdir()) == []


@on_posix
@each_file_codec
@pytest.mark.parametrize(
    "damage",
    [
        'truncate -s $(($(wc -c < "$output") * 60 / 100)) "$output"',
        'truncate -s 0 "$output"',
        # A file that is whole in itself, with some of the frames.
        'cut="$output.${output##*.}"; "$ffmpeg" -v error -i "$output" -c copy -t 0.2 "$cut" && mv "$cut" "$output"',
        None,
    ],
)
def test_a_file_cut_short_by_an_encoder_that_reports_success_is_found(use_ffmpeg_wrapper, codec, damage):
    folder = use_ffmpeg_wrapper(f'"$ffmpeg" "$@" || exit; if [ -f "$output" ]; then {damage or ":"}; fi')
    frames = NOISE[:, :64, :64]
    if damage:
        with pytest.raises(RuntimeError, match="not written completely"):
            export(frames, folder, codec)
        assert list(folder.iterdir()) == []
    else:  # the wrapper alone does no harm
        assert export(frames, folder, codec).exists()


@on_posix
def test_a_comment_that_an_encoder_drops_is_missed(use_ffmpeg_wrapper):
    drop = '"$ffmpeg" -v error -i "$output" -c copy -map_metadata -1 "$output.mp4" && mv "$output.mp4" "$output"'
    folder = use_ffmpeg_wrapper(f'"$ffmpeg" "$@" || exit; if [ -f "$output" ]; then {drop}; fi')
    with pytest.raises(RuntimeError, match="its comment is not what was given"):
        export(NOISE, folder, "h264", comment="seed 7")
    assert list(folder.iterdir()) == []
    assert read_comment(export(NOISE, folder, "h264")) is None


@on_posix
def test_what_ffmpeg_says_last_is_in_the_error(use_ffmpeg_wrapper):
    folder = use_ffmpeg_wrapper("echo first >&2; echo 'No space left on device' >&2; exit 7")
    frames = np.zeros((30, 256, 256, 3), np.uint8)  # more than a pipe holds: writing fails too
    with pytest.raises(WriteError, match=r"^ffmpeg ended with status 7: No space left on device$"):
        export(frames, folder, "h264")
    assert list(folder.iterdir()) == []


@on_posix
def test_a_full_disk_is_named_where_ffmpeg_says_last_what_followed_from_it(use_ffmpeg_wrapper):
    folder = use_ffmpeg_wrapper("echo 'No space left on device' >&2; echo 'Nothing was written' >&2; exit 228")
    with pytest.raises(RuntimeError, match=r"^ffmpeg ended with status 228 \(No space left on device\): Nothing was"):
        export(NOISE, folder, "h264")
