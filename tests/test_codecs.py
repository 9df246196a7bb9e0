"""Codecs: whatever a video is written as, it is exactly what was asked for, and nothing else is touched."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kandinsky5_nabla.pipeline.codecs import CODECS
from kandinsky5_nabla.pipeline.export import VideoInfo, export_video, probe_video, read_video

each_codec = pytest.mark.parametrize("codec", CODECS)
each_mp4 = pytest.mark.parametrize("codec", ["h264", "h265"])


def smooth_frames(count=5, height=64, width=96):
    """A red ramp to the right, a green ramp downwards and blue that grows with time: uint8 [F, H, W, 3]."""
    t, y, x = np.meshgrid(np.linspace(0, 1, count), np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    return np.rint(255 * np.stack([x, y, t], axis=-1)).astype(np.uint8)


FRAMES = smooth_frames()


def export(folder, codec, frames=FRAMES, fps=24, **arguments):
    return export_video(frames, folder / f"video{CODECS[codec].suffix}", fps, codec=codec, **arguments)


def contents(path):
    """Everything that a video consists of, by name."""
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


def psnr(a, b):
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b.astype(float)) ** 2), 1e-9))


RATES = [24, 25, 30, 8, 50, 0.5, 12.5, 24000 / 1001]


@pytest.mark.parametrize(("codec", "size"), [("h265", (64, 96)), ("h265", (16, 130)), ("frames", (33, 51))])
@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("count", [1, 5])
def test_the_video_has_exactly_the_size_count_and_rate_asked_for(tmp_path, codec, size, fps, count):
    height, width = size
    path = export(tmp_path, codec, smooth_frames(count, height, width), fps, num_frames=count)
    assert probe_video(path) == VideoInfo(width, height, Fraction(fps).limit_denominator(1001), count)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fps", [*RATES, 33, 49.9, 1 / 655])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_a_gif_shows_each_frame_within_half_a_hundredth_of_its_time(tmp_path, fps, count):
    """Pillow reads the delays: no code of ours."""
    path = export(tmp_path, "gif", smooth_frames(count, 17, 23), fps)
    with Image.open(path) as image:
        assert (image.width, image.height, image.n_frames) == (23, 17, count)
        assert image.info["loop"] == 0
        hundredths = []
        for index in range(count):
            image.seek(index)
            hundredths.append(round(image.info["duration"] / 10))
    assert min(hundredths) >= 2  # browsers take less for 10
    ends = np.cumsum(hundredths)
    exact = [100 * (index + 1) / fps for index in range(count)]
    np.testing.assert_allclose(ends, exact, atol=0.5001)
    assert probe_video(path) == VideoInfo(23, 17, Fraction(100 * count, int(ends[-1])), count)


def test_a_gif_at_a_rate_that_takes_whole_hundredths_has_that_rate(tmp_path):
    assert probe_video(export(tmp_path, "gif", fps=25)).fps == 25


@each_codec
def test_frames_that_do_not_change_are_all_kept(tmp_path, codec):
    still = np.repeat(FRAMES[:1], 7, axis=0)
    path = export(tmp_path, codec, still, num_frames=7)
    assert read_video(path)[0].shape == still.shape


# A palette of 256 colours costs a GIF of smooth ramps much; the pixels of PNGs are the frames' own.
@pytest.mark.parametrize(("codec", "quality"), [("h264", 38), ("h265", 38), ("gif", 20), ("frames", 100)])
def test_decoded_frames_look_like_the_originals_in_order_and_colour(tmp_path, codec, quality):
    frames = smooth_frames(9, 130, 250)
    decoded, info = read_video(export(tmp_path, codec, frames))
    for index, frame in enumerate(frames):
        assert psnr(decoded[index], frame) > quality
    assert psnr(decoded[0], frames[-1]) < 10
    picked, same_info = read_video(tmp_path / f"video{CODECS[codec].suffix}", [0, 3, 8])
    np.testing.assert_array_equal(picked, decoded[[0, 3, 8]])
    assert same_info == info


def test_crf_changes_the_quality_of_h264_and_h265_and_its_default_is_the_tables(tmp_path):
    for codec in ("h264", "h265"):
        sizes = {}
        for crf in (None, CODECS[codec].default_crf, 40):
            sizes[crf] = export(tmp_path, codec, overwrite=True, crf=crf).stat().st_size
        assert sizes[None] == sizes[CODECS[codec].default_crf] > sizes[40]


def atoms(content, *path):
    """Names and contents of the atoms of an MP4, in order: those of the file or of the atom at this path."""
    found, position = [], 0
    while position < len(content):
        size, name = int.from_bytes(content[position : position + 4], "big"), content[position + 4 : position + 8]
        found.append((name.decode("latin-1"), content[position + 8 : position + size]))
        position += size
    return atoms(dict(found)[path[0]], *path[1:]) if path else found


@each_mp4
def test_the_index_of_an_mp4_comes_before_its_pixels(tmp_path, codec):
    names = [name for name, _ in atoms(export(tmp_path, codec).read_bytes())]
    assert names[0] == "ftyp"
    assert names.index("moov") < names.index("mdat")


@each_mp4
def test_an_mp4_holds_no_time_of_its_making(tmp_path, codec):
    header = dict(atoms(export(tmp_path, codec).read_bytes(), "moov"))["mvhd"]
    assert header[4:12] == bytes(8)  # created and changed, in seconds


@pytest.mark.parametrize(("codec", "tag", "stream"), [("h264", "avc1", "h264 (High)"), ("h265", "hvc1", "hevc (Main)")])
def test_an_mp4_has_the_tag_and_the_colours_that_players_look_for(tmp_path, codec, tag, stream):
    import imageio_ffmpeg

    path = export(tmp_path, codec)
    sample_table = dict(atoms(path.read_bytes(), "moov", "trak", "mdia", "minf", "stbl"))
    assert [name for name, _ in atoms(sample_table["stsd"][8:])] == [tag]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path)]
    log = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert stream in log
    assert "yuv420p(tv, bt709" in log


@each_codec
def test_frames_are_drawn_one_at_a_time_and_give_the_same_bytes_again(tmp_path, codec):
    drawn = []

    def generate():
        for index, frame in enumerate(FRAMES):
            # Frames may be reused by their maker: an export that collects them would see only the last.
            buffer[:] = frame
            drawn.append(index)
            yield buffer

    buffer = np.empty_like(FRAMES[0])
    first = contents(export(tmp_path, codec, generate(), comment="seed 7"))
    assert drawn == list(range(len(FRAMES)))
    assert contents(export(tmp_path, codec, FRAMES, comment="seed 7", overwrite=True)) == first


def must_not_be_drawn():
    raise AssertionError("a frame was drawn before the arguments were checked")
    yield


@pytest.mark.parametrize(
    ("codec", "name", "match"),
    [
        ("h264", "cat.gif", r"end in \.mp4, got 'cat\.gif': .*cat\.mp4 works for codec 'h264', .*cat\.gif for 'gif'$"),
        ("h265", "cat", r"end in \.mp4, got 'cat': .*cat\.mp4 works for codec 'h265'$"),
        ("gif", "cat.mp4", r"end in \.gif, got 'cat\.mp4': .*cat\.gif works .*cat\.mp4 for 'h264' and 'h265'$"),
        ("frames", "cat.mp4", r"be that of a folder, without a suffix, got 'cat\.mp4': .*cat works for codec 'frames'"),
        ("frames", "cat.png", r"without a suffix, got 'cat\.png'"),
        ("av1", "cat.mp4", "codec 'av1' is not known; h264, h265, gif, frames are"),
    ],
)
def test_a_name_that_the_codec_does_not_have_is_refused_with_one_that_works(tmp_path, codec, name, match):
    with pytest.raises(ValueError, match=match):
        export_video(must_not_be_drawn(), tmp_path / name, codec=codec)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("codec", CODECS)
def test_an_empty_name_is_refused(codec):
    with pytest.raises(ValueError, match=f"got '': video{re.escape(CODECS[codec].suffix)} works"):
        export_video(must_not_be_drawn(), "", codec=codec)


@pytest.mark.parametrize(
    ("codec", "arguments", "match"),
    [
        ("gif", {"crf": 18}, r"crf 18: codec 'gif' has no such quality; leave it out \(h264 and h265 take it\)"),
        ("frames", {"crf": 0}, "crf 0: codec 'frames' has no such quality"),
        ("h265", {"crf": 52}, "crf 52: must be a whole number from 0 to 51; 51 works"),
        ("h264", {"crf": 18.5}, r"crf 18\.5: must be a whole number from 0 to 51"),
        ("h264", {"crf": True}, "crf True: must be a whole number from 0 to 51"),
        ("gif", {"fps": 51}, "fps must be a number from 1/655 to 50 with codec 'gif', got 51"),
        ("gif", {"fps": 0.001}, "from 1/655 to 50"),
        ("frames", {"fps": float("nan")}, "fps must be a number from 1/1001 to 1000"),
    ],
)
def test_an_argument_that_the_codec_does_not_take_is_refused_before_a_frame_is_drawn(tmp_path, codec, arguments, match):
    with pytest.raises(ValueError, match=match):
        export(tmp_path, codec, must_not_be_drawn(), **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("codec", "size", "match"),
    [
        ("h265", (14, 64), "14x64 .*codec 'h265' needs even numbers of at least 16: 16x64 would work"),
        ("h265", (8, 17), "16x16, 16x18 would work"),
        ("h264", (33, 51), "even numbers of at least 2: 32x50, 32x52, 34x50, 34x52 would work"),
        ("gif", (0, 8), "codec 'gif' needs numbers of at least 1: 1x8 would work"),
        ("frames", (8, 0), "8x1 would work"),
    ],
)
def test_a_size_that_the_codec_cannot_hold_is_refused_with_the_nearest_that_work(tmp_path, codec, size, match):
    with pytest.raises(ValueError, match=match):
        export(tmp_path, codec, np.zeros((2, *size, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("codec", "size"), [("h264", (2, 2)), ("h265", (16, 16)), ("gif", (1, 1)), ("frames", (1, 1))])
def test_the_smallest_size_that_the_table_names_works(tmp_path, codec, size):
    path = export(tmp_path, codec, smooth_frames(3, *size))
    assert probe_video(path) == VideoInfo(*size, probe_video(path).fps, 3)


@each_codec
def test_an_error_in_the_frames_is_passed_on_and_leaves_what_was_there(tmp_path, codec):
    def failing():
        yield from FRAMES
        raise ZeroDivisionError

    path = export(tmp_path, codec, FRAMES[:2])
    before = contents(path)
    with pytest.raises(ZeroDivisionError):
        export(tmp_path, codec, failing(), overwrite=True)
    with pytest.raises(FileExistsError, match="exists; choose another name"):
        export(tmp_path, codec, must_not_be_drawn())
    assert contents(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_gif_is_refused_by_name(tmp_path):
    complete = export(tmp_path, "gif").read_bytes()
    broken = tmp_path / "broken.gif"
    for content in (complete[:100], complete[:-1], complete + b"x", complete[:6]):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.gif is not a complete video"):
            probe_video(broken)


def test_the_metadata_of_a_folder_of_frames_says_what_pngs_cannot(tmp_path):
    path = export(tmp_path, "frames", fps=24000 / 1001, comment="seed 7")
    assert sorted(contents(path)) == [*(f"frame-000{index}.png" for index in range(5)), "metadata.json"]
    expected = {"fps": "24000/1001", "num_frames": 5, "width": 96, "height": 64, "comment": "seed 7"}
    assert json.loads((path / "metadata.json").read_text("utf-8")) == expected


def test_codecs_are_listed_without_loading_torch_or_numpy():
    code = """
import sys, kandinsky5_nabla.pipeline.codecs
assert not {"torch", "numpy", "PIL"} & set(sys.modules), "loaded"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
