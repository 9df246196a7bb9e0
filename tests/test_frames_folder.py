"""A folder of frames: complete under its name or not there, and nobody's files are replaced."""

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from kandinsky5_nabla.pipeline.export import export_video, probe_video, read_comment, read_video

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 9, 15, 3), np.uint8)


def export(path, frames=FRAMES, **arguments):
    return export_video(frames, path, codec="frames", **arguments)


def snapshot(folder):
    """Every file below a folder, with its content."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def must_not_be_drawn():
    raise AssertionError("a frame was drawn before the path was checked")
    yield


def test_the_folder_appears_only_when_it_is_complete(tmp_path):
    path, seen = tmp_path / "video", []

    def watching():
        for frame in FRAMES:
            seen.append((path.exists(), len(list(tmp_path.iterdir()))))
            yield frame

    assert export(path, watching()) == path
    assert seen == [(False, 1)] * len(FRAMES)  # what is written has a temporary name beside it
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(read_video(path)[0], FRAMES)
    assert [Image.open(path / f"frame-000{index}.png").size for index in range(5)] == [(15, 9)] * 5


def test_overwriting_leaves_none_of_the_old_frames(tmp_path):
    path = export(tmp_path / "video", comment="old")
    export(path, FRAMES[:2][::-1], overwrite=True)
    assert sorted(snapshot(tmp_path)) == ["video/frame-0000.png", "video/frame-0001.png", "video/metadata.json"]
    np.testing.assert_array_equal(read_video(path)[0], FRAMES[:2][::-1])
    assert read_comment(path) is None


def test_an_empty_folder_is_replaced_only_when_that_is_asked_for(tmp_path):
    path = tmp_path / "video"
    path.mkdir()
    with pytest.raises(FileExistsError, match="exists; choose another name or ask to overwrite it"):
        export(path, must_not_be_drawn())
    assert probe_video(export(path, overwrite=True)).num_frames == 5


FOREIGN = {
    "a note": lambda folder: (folder / "notes.txt").write_text("precious"),
    "a frame by another name": lambda folder: (folder / "frame-1.png").write_text("precious"),
    "a hidden file": lambda folder: (folder / ".git").write_text("precious"),
    "a folder in a frame's name": lambda folder: (folder / "frame-0007.png").mkdir(),
    "a link in a frame's name": lambda folder: (folder / "frame-0007.png").symlink_to("/"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_that_holds_more_than_frames_is_never_replaced(tmp_path, kind):
    path = export(tmp_path / "video")
    FOREIGN[kind](path)
    before, names = snapshot(tmp_path), sorted(path.iterdir())
    with pytest.raises(FileExistsError, match="beside frames and is not replaced"):
        export(path, must_not_be_drawn(), overwrite=True)
    assert (snapshot(tmp_path), sorted(path.iterdir())) == (before, names)


def test_a_metadata_file_without_frames_is_someone_elses(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds metadata\.json beside frames"):
        export(tmp_path / "data", must_not_be_drawn(), overwrite=True)
    assert snapshot(tmp_path) == {"data/metadata.json": b"precious"}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_comes_into_the_folder_meanwhile_is_kept(tmp_path, kind):
    path = export(tmp_path / "video")

    def frames():
        yield from FRAMES[:2]
        FOREIGN[kind](path)

    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError, match="beside frames and is not replaced"):
        export(path, frames(), overwrite=True)
    assert before.items() <= snapshot(tmp_path).items()
    assert len(list(path.iterdir())) == 7  # five frames, the metadata, and what came
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", [lambda path: path.write_text("precious"), lambda path: path.symlink_to("nowhere")])
def test_a_file_or_a_link_of_this_name_is_never_replaced(tmp_path, make, overwrite):
    path = tmp_path / "video"
    make(path)
    with pytest.raises(NotADirectoryError if overwrite else FileExistsError):
        export(path, must_not_be_drawn(), overwrite=overwrite)
    assert os.listdir(tmp_path) == ["video"]
    assert path.is_symlink() or path.read_text() == "precious"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_name_that_is_taken_meanwhile_is_kept(tmp_path, kind):
    path = tmp_path / "video"

    def frames():
        yield from FRAMES
        if kind == "folder":
            path.mkdir()
            (path / "notes.txt").write_text("precious")
        else:
            path.write_text("precious")

    with pytest.raises(FileExistsError, match="appeared meanwhile and is kept"):
        export(path, frames())
    assert list(snapshot(tmp_path).values()) == [b"precious"]
    assert os.listdir(tmp_path) == ["video"]


def test_a_folder_that_vanishes_meanwhile_is_no_reason_to_fail(tmp_path):
    path = export(tmp_path / "video")

    def frames():
        yield from FRAMES[:2]
        shutil.rmtree(path)

    assert probe_video(export(path, frames(), overwrite=True)).num_frames == 2


def test_bad_paths_are_refused_before_a_frame_is_drawn(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*missing does not exist"):
        export(tmp_path / "missing" / "video", must_not_be_drawn())
    with pytest.raises(OSError, match="too long"):
        export(tmp_path / ("x" * 300), must_not_be_drawn())
    assert list(tmp_path.iterdir()) == []


def damage_metadata(folder, **values):
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(metadata | values))


DAMAGES = {
    "a frame is missing": (lambda folder: (folder / "frame-0003.png").unlink(), r"frame-0003\.png cannot be read"),
    "a frame is cut short": (lambda folder: os.truncate(folder / "frame-0002.png", 300), r"frame-0002\.png cannot be"),
    "a frame is empty": (lambda folder: os.truncate(folder / "frame-0002.png", 0), r"frame-0002\.png cannot be read"),
    "a frame has another size": (lambda folder: damage_metadata(folder, width=16), r"frame-0000\.png is no RGB image"),
    "there is no metadata": (lambda folder: (folder / "metadata.json").unlink(), r"has no metadata\.json"),
    "no JSON": (lambda folder: (folder / "metadata.json").write_text("{"), r"metadata\.json is damaged"),
    "no object": (lambda folder: (folder / "metadata.json").write_text("[]"), "no JSON object"),
    "no rate": (lambda folder: damage_metadata(folder, fps="fast"), "no size, rate or number"),
    "no number": (lambda folder: damage_metadata(folder, num_frames=None), "no size, rate or number"),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("read", [probe_video, read_video])
def test_a_damaged_folder_is_refused_by_name(tmp_path, kind, read):
    path = export(tmp_path / "video")
    damage, match = DAMAGES[kind]
    damage(path)
    with pytest.raises(ValueError, match=rf"video is not a complete video: .*{match}"):
        read(path)
