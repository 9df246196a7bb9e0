"""Export: the file on disk is exactly what was asked for, or there is no file."""

import hashlib
import os
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kandinsky5_nabla.pipeline.export import VideoInfo, export_video, probe_video, read_video, to_uint8


def smooth_frames(count=5, height=64, width=96):
    """A red ramp to the right, a green ramp downwards and blue that grows with time: uint8 [F, H, W, 3]."""
    t, y, x = np.meshgrid(np.linspace(0, 1, count), np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    return np.rint(255 * np.stack([x, y, t], axis=-1)).astype(np.uint8)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2))


def assert_leaves_nothing(folder, error, frames, match, **arguments):
    with pytest.raises(error, match=match):
        export_video(frames, folder / "video.mp4", **arguments)
    assert list(folder.iterdir()) == []


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("size", [(256, 256), (264, 200), (130, 250), (16, 16), (2, 2)])
@pytest.mark.parametrize(
    ("count", "fps", "rate"),
    [
        (1, 24, Fraction(24)),
        (5, 25, Fraction(25)),
        (17, 24000 / 1001, Fraction(24000, 1001)),
        (5, 23.976, Fraction(2997, 125)),
        (17, 8, Fraction(8)),
        (1, 0.5, Fraction(1, 2)),
    ],
)
def test_the_file_has_exactly_the_size_count_and_rate_asked_for(tmp_path, size, count, fps, rate):
    height, width = size
    path = export_video(smooth_frames(count, height, width), tmp_path / "video.mp4", fps, num_frames=count)
    assert probe_video(path) == VideoInfo(width, height, rate, count)
    assert read_video(path)[0].shape == (count, height, width, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["video.mp4"]


def test_decoded_frames_look_like_the_originals_in_order_and_colour(tmp_path):
    frames = smooth_frames(17, 130, 250)
    decoded, _ = read_video(export_video(frames, tmp_path / "video.mp4"))
    for index, frame in enumerate(frames):
        assert psnr(decoded[index], frame) > 38
    assert psnr(decoded[0], frames[-1]) < 10
    assert psnr(decoded[..., ::-1], frames) < 15


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (12, 100, 200)])
def test_flat_colours_come_back(tmp_path, colour):
    frames = np.broadcast_to(np.uint8(colour), (2, 32, 48, 3))
    decoded, _ = read_video(export_video(frames, tmp_path / "video.mp4"))
    assert np.abs(decoded.astype(int) - colour).max() <= 3


def test_the_file_is_tagged_streams_at_once_and_plays_everywhere(tmp_path):
    import imageio_ffmpeg

    path = export_video(smooth_frames(), tmp_path / "video.mp4")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path)]
    log = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "h264 (High)" in log
    assert "yuv420p(tv, bt709" in log
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


UINT8 = smooth_frames(5, 34, 50)
FORMS = {
    "list of arrays": list(UINT8),
    "not contiguous": UINT8[:, :, ::-1][:, :, ::-1],
    "float64": UINT8 / 255,
    "float32": (UINT8 / 255).astype(np.float32),
    "float16": (UINT8 / 255).astype(np.float16),
    "images": [Image.fromarray(frame) for frame in UINT8],
    "tensor uint8 FHWC": torch.tensor(UINT8),
    "tensor uint8 FCHW": torch.tensor(UINT8).permute(0, 3, 1, 2),
    "tensor float FCHW": torch.tensor(UINT8).permute(0, 3, 1, 2) / 255,
    "tensor float FHWC": torch.tensor(UINT8) / 255,
    "tensor with gradient": (torch.tensor(UINT8) / 255).requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_frames_in_any_form_give_the_same_bytes(tmp_path, form):
    expected = export_video(UINT8, tmp_path / "uint8.mp4").read_bytes()
    assert export_video(FORMS[form], tmp_path / "form.mp4").read_bytes() == expected


def test_a_generator_is_consumed_one_frame_at_a_time_and_gives_the_same_bytes(tmp_path):
    drawn = []

    def generate():
        for index, frame in enumerate(UINT8):
            # Frames may be reused by their maker: an export that collects them would see only the last.
            buffer[:] = frame
            drawn.append(index)
            yield buffer

    buffer = np.empty_like(UINT8[0])
    path = export_video(generate(), tmp_path / "generator.mp4")
    assert drawn == list(range(len(UINT8)))
    assert path.read_bytes() == export_video(UINT8, tmp_path / "uint8.mp4").read_bytes()


def test_another_process_on_fewer_processors_writes_the_same_bytes(tmp_path):
    code = """
        import os, sys, numpy as np
        from kandinsky5_nabla.pipeline.export import export_video
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for path in sys.argv[2:]:
            export_video(np.load(sys.argv[1]), path, codec=os.path.basename(path).split(".")[0])
    """
    frames = np.random.default_rng(0).integers(0, 256, (9, 128, 128, 3), np.uint8)
    np.save(tmp_path / "frames.npy", frames)
    there = [tmp_path / name for name in ("h264.mp4", "h265.mp4", "gif.gif")]
    done = run_python(code, tmp_path / "frames.npy", *there)
    assert done.returncode == 0, done.stderr
    for other in there:
        here = export_video(frames, tmp_path / f"here-{other.name}", codec=other.stem).read_bytes()
        assert hashlib.sha256(here).digest() == hashlib.sha256(other.read_bytes()).digest()
        assert b"Lavf" not in here  # the version of the program
        assert b"x265 (build" not in here  # its options, among them the features of the CPU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_clamped_and_rounded_in_every_dtype(dtype):
    values = torch.tensor([-0.5, 0.0, 0.25, 0.5, 1.0, 1.5], dtype=dtype)
    frame = to_uint8(values[:, None, None].expand(6, 2, 3))
    assert frame[:, 0, 0].tolist() == [0, 0, 64, 128, 255, 255]  # 63.75 and 127.5: not cut off


def test_to_uint8_tells_channels_first_from_channels_last():
    chw = torch.arange(3 * 4 * 6, dtype=torch.uint8).reshape(3, 4, 6)
    np.testing.assert_array_equal(to_uint8(chw), chw.permute(1, 2, 0).numpy())
    np.testing.assert_array_equal(to_uint8(chw.permute(1, 2, 0)), chw.permute(1, 2, 0).numpy())
    three_rows = chw.reshape(3, 8, 3)
    np.testing.assert_array_equal(to_uint8(three_rows), three_rows.numpy())


NAN = np.where(np.arange(5)[:, None, None, None] == 3, np.nan, UINT8 / 255)


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "no frames"),
        (iter(()), "no frames"),
        (np.zeros((2, 33, 50, 3), np.uint8), "33x50.*even numbers.*: 32x50, 34x50"),
        (np.zeros((2, 34, 1, 3), np.uint8), "34x1 .*even numbers of at least 2: 34x2 would"),
        (np.zeros((2, 33, 51, 3), np.uint8), "32x50, 32x52, 34x50, 34x52"),
        ([UINT8[0], UINT8[0], UINT8[0][:32]], "frame 2 is 32x50.*the first is 34x50"),
        (NAN, "frame 3 holds values that are not finite"),
        (torch.tensor(NAN, dtype=torch.bfloat16), "frame 3 holds values that are not finite"),
        ([UINT8[0] / 255, np.full_like(UINT8[0], np.inf, dtype=float)], "frame 1 .* not finite"),
        (UINT8[0], r"frame 0 has the shape \[50, 3\]"),
        (UINT8.transpose(0, 3, 1, 2), r"frame 0 has the shape \[3, 34, 50\]; it must be \[H, W, 3\]"),
        (UINT8[None], r"frame 0 has the shape \[5, 34, 50, 3\]"),
        (UINT8.astype(np.int64), "frame 0 has the dtype int64"),
        (torch.tensor(UINT8).int(), "frame 0 has the dtype int32"),
        ([Image.fromarray(UINT8[0]).convert("RGBA")], r"frame 0 is an image of mode RGBA.*convert\('RGB'\)"),
        ([Image.fromarray(UINT8[0]).convert("HSV")], "frame 0 is an image of mode HSV"),
        ([list(UINT8)], "frame 0 is a list"),
    ],
)
def test_frames_that_cannot_be_written_are_refused_and_leave_nothing(tmp_path, frames, match):
    assert_leaves_nothing(tmp_path, ValueError, frames, match)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fps": 0}, "fps must be a number from 1/1001 to 1000 with codec 'h264', got 0"),
        ({"fps": -24}, "fps must be"),
        ({"fps": float("nan")}, "fps must be"),
        ({"fps": float("inf")}, "fps must be"),
        ({"fps": 1e-5}, "fps must be"),
        ({"fps": 1001}, "fps must be"),
        ({"crf": 52}, "crf 52: must be a whole number from 0 to 51; 51 works"),
        ({"crf": -1}, "crf -1: must be"),
        ({"num_frames": 4}, "more than the 4 frames"),
        ({"num_frames": 6}, "there are 5 frames, 6 were asked for"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_and_leave_nothing(tmp_path, arguments, match):
    assert_leaves_nothing(tmp_path, ValueError, UINT8, match, **arguments)


def failing_after(frames, error):
    yield from frames
    raise error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("stop"), BrokenPipeError("a pipe of the caller"), ZeroDivisionError()]
)
@pytest.mark.parametrize("count", [0, 3])
def test_an_error_or_interrupt_in_the_frames_is_passed_on_and_leaves_nothing(tmp_path, error, count):
    with pytest.raises(type(error)) as raised:
        export_video(failing_after(UINT8[:count], error), tmp_path / "video.mp4")
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_no_ffmpeg_process_is_left_after_success_or_failure(tmp_path):
    export_video(UINT8, tmp_path / "video.mp4")
    read_video(tmp_path / "video.mp4")
    with pytest.raises(ZeroDivisionError):
        export_video(failing_after(UINT8, ZeroDivisionError()), tmp_path / "other.mp4")
    children = [Path(task, "children").read_text() for task in Path("/proc/self/task").iterdir()]
    names = [Path("/proc", pid, "comm").read_text() for line in children for pid in line.split()]
    assert not [name for name in names if "ffmpeg" in name]


def must_not_be_drawn():
    raise AssertionError("a frame was drawn before the path was checked")
    yield


def test_an_existing_file_is_kept_unless_overwriting_is_asked_for(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match=r"video\.mp4 exists"):
        export_video(must_not_be_drawn(), path)
    with pytest.raises(ZeroDivisionError):
        export_video(failing_after(UINT8, ZeroDivisionError()), path, overwrite=True)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
    export_video(UINT8, path, overwrite=True)
    assert probe_video(path).num_frames == len(UINT8)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch, links):
    path = tmp_path / "video.mp4"

    def frames():
        yield from UINT8
        path.write_text("precious")

    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    with pytest.raises(FileExistsError):
        export_video(frames(), path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def refuse_link(source, target):
    raise PermissionError("this file system has no hard links")


def test_a_file_system_without_hard_links_works(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse_link)
    assert probe_video(export_video(UINT8, tmp_path / "video.mp4")).num_frames == len(UINT8)
    assert [file.name for file in tmp_path.iterdir()] == ["video.mp4"]


def test_bad_paths_are_refused_before_a_frame_is_drawn(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*missing does not exist"):
        export_video(must_not_be_drawn(), tmp_path / "missing" / "video.mp4")
    with pytest.raises(ValueError, match=r"must end in \.mp4, got 'video\.gif'"):
        export_video(must_not_be_drawn(), tmp_path / "video.gif")
    with pytest.raises(OSError, match="too long"):
        export_video(must_not_be_drawn(), tmp_path / f"{'x' * 300}.mp4")
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(IsADirectoryError):
        export_video(must_not_be_drawn(), tmp_path / "folder.mp4", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.mp4"]


@pytest.mark.parametrize("name", ["-v.mp4", "a b%03d:c'.mp4", "кот.MP4", "file:x/http:y.mp4"])
def test_names_that_look_like_options_patterns_or_protocols_are_only_names(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    assert export_video(UINT8, name) == Path(name)
    assert read_video(name)[1].num_frames == len(UINT8)
    assert os.listdir(Path(name).parent) == [Path(name).name]


def test_reading_picks_frames_by_number(tmp_path):
    path = export_video(smooth_frames(17), tmp_path / "video.mp4")
    everything, info = read_video(path)
    picked, same_info = read_video(path, [0, 5, 16])
    np.testing.assert_array_equal(picked, everything[[0, 5, 16]])
    assert same_info == info
    for indices in ([], [5, 0], [3, 3], [17], [-1]):
        with pytest.raises(ValueError, match=r"increasing and within 0\.\.16"):
            read_video(path, indices)


@pytest.mark.parametrize("read", [probe_video, read_video])
def test_files_that_are_no_complete_video_are_refused_by_name(tmp_path, read):
    with pytest.raises(FileNotFoundError, match=r"missing\.mp4 does not exist"):
        read(tmp_path / "missing.mp4")
    complete = export_video(UINT8, tmp_path / "video.mp4").read_bytes()
    for content in (b"", b"no video", complete[: len(complete) // 10], complete[:-10]):
        (tmp_path / "broken.mp4").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.mp4 is not a complete video"):
            read(tmp_path / "broken.mp4")
