"""The contact sheet shows the frames that it says it shows."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kandinsky5_nabla.pipeline.export import export_video
from kandinsky5_nabla.scripts.contact_sheet import contact_sheet, evenly_spaced, main

SCRIPT = Path(__file__).parent.parent / "scripts" / "contact_sheet.py"


def gray_frames(count, height=32, width=48):
    """Frame k is plain gray of value 10 k."""
    return np.broadcast_to(np.arange(0, 10 * count, 10, dtype=np.uint8)[:, None, None, None], (count, height, width, 3))


@pytest.fixture
def video(tmp_path):
    return export_video(gray_frames(17), tmp_path / "video.mp4")


def read_png(path):
    with Image.open(path, formats=["PNG"]) as image:
        return image.copy()


def grays(sheet, columns, count, cell=(48, 32), gap=8, caption=16):
    """The gray in the middle of each cell, in reading order."""
    pixels = np.asarray(sheet)
    middles = [
        (
            gap + index // columns * (cell[1] + caption + gap) + cell[1] // 2,
            gap + index % columns * (cell[0] + gap) + cell[0] // 2,
        )
        for index in range(count)
    ]
    return [int(pixels[y, x, 0]) for y, x in middles]


def test_frames_are_evenly_spaced_with_first_and_last():
    assert evenly_spaced(5, 17) == [0, 4, 8, 12, 16]
    assert evenly_spaced(1, 17) == [0]
    assert evenly_spaced(17, 17) == list(range(17))
    for total in (2, 3, 100, 241):
        for count in range(2, total + 1):
            numbers = evenly_spaced(count, total)
            assert (numbers[0], numbers[-1]) == (0, total - 1)
            assert len(set(numbers)) == count
    for count in (0, -1, 18):
        with pytest.raises(ValueError, match="between 1 and 17"):
            evenly_spaced(count, 17)


def test_the_sheet_holds_the_right_frames_in_reading_order(video, tmp_path, capsys):
    assert main([str(video), "--columns", "3", "--frames", "5"]) == 0
    output = tmp_path / "video.png"
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    sheet = read_png(output)
    assert np.abs(np.subtract(grays(sheet, 3, 5), [0, 40, 80, 120, 160])).max() <= 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["video.mp4", "video.png"]


def test_each_frame_has_its_number_below():
    plain = np.full((32, 48, 3), 128, np.uint8)
    zero, seven = (np.asarray(contact_sheet({number: plain}, 1))[8 + 32 : -8] for number in (0, 7))
    assert (zero < 128).any()
    assert (seven < 128).any()
    assert (zero != seven).any()


def test_a_sheet_of_large_frames_fits_on_a_screen_and_keeps_the_proportions():
    frames = {number: np.zeros((512, 768, 3), np.uint8) for number in range(12)}
    sheet = contact_sheet(frames, 4)
    assert 1500 < sheet.width <= 1600
    black = np.argwhere(np.asarray(sheet)[:, :, 0].min(axis=0) == 0)
    assert black.min() == 8
    assert sheet.height == 3 * (round(512 * 390 / 768) + 16 + 8) + 8
    with pytest.raises(ValueError, match="at most 176 fit"):
        contact_sheet(dict.fromkeys(range(400), frames[0]), 400)


def test_a_short_video_gives_all_of_its_frames(tmp_path):
    path = export_video(gray_frames(2), tmp_path / "short.mp4")
    assert main([str(path)]) == 0
    assert read_png(tmp_path / "short.png").size == (2 * (48 + 8) + 8, 32 + 16 + 8 + 8)


def test_an_existing_sheet_is_kept_unless_overwriting_is_asked_for(video, tmp_path, capsys):
    output = tmp_path / "sheet.png"
    output.write_text("precious")
    assert main([str(video), "--output", str(output)]) == 2
    assert output.read_text() == "precious"
    assert main([str(video), "--output", str(output), "--overwrite"]) == 0
    assert read_png(output).width > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["sheet.png", "video.mp4"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["missing.mp4"], "missing.mp4 does not exist"),
        (["missing/video.mp4"], "video.mp4 does not exist"),
        (["broken.mp4"], "broken.mp4 is not a complete video"),
        (["video.mp4", "--frames", "18"], "between 1 and 17"),
        (["video.mp4", "--frames", "0"], "between 1 and 17"),
        (["video.mp4", "--columns", "0"], "--columns must be at least 1"),
        (["video.mp4", "--output", "sheet.jpg"], "must end in .png"),
        (["video.mp4", "--output", "missing/sheet.png"], "folder missing does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(video, tmp_path, monkeypatch, capsys, arguments, match):
    monkeypatch.chdir(tmp_path)
    Path("broken.mp4").write_text("no video")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert match in captured.err
    assert sorted(os.listdir()) == ["broken.mp4", "video.mp4"]


def test_the_script_runs_by_its_path_and_its_help_loads_nothing_heavy(video, tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, video], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(tmp_path / "video.png")), done.stderr
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "numpy" not in done.stderr
    assert "torch" not in done.stderr
