"""Videos and selections of blocks that cannot be made of what is given: an error of the catalogue, at once."""

import numpy as np
import pytest
import torch

from kandinsky5_nabla.attention import (
    NablaAttentionMetadataBuilder,
    get_attention_backend,
    nabla_mask,
    nablaT_v2,
    sta_mask,
)
from kandinsky5_nabla.configs import errors
from kandinsky5_nabla.pipeline.export import export_video, probe_video, read_comment, read_video

NAN = float("nan")
FRAMES = np.zeros((2, 16, 16, 3), np.uint8)


@pytest.mark.parametrize(
    ("frames", "path", "arguments", "kind", "message"),
    [
        (None, "cat.mp4", {}, errors.VideoError, "frames: must be a list, array, tensor or iterator, not NoneType"),
        (torch.tensor(1.0), "cat.mp4", {}, errors.VideoError, "iterator, not Tensor"),
        (FRAMES, 5, {}, errors.ArgumentError, "path 5: must be a text or a pathlib.Path"),
        (FRAMES, "c\0t.mp4", {}, errors.ArgumentError, "holds a NUL character"),
        (FRAMES, "cat.mp4", {"fps": "8"}, errors.VideoError, "fps must be a number from .*, got '8'"),
        (FRAMES, "cat.mp4", {"fps": 10**400}, errors.VideoError, "fps must be a number"),
        (FRAMES, "cat.mp4", {"fps": True}, errors.VideoError, "got True"),
        (FRAMES, "cat.mp4", {"crf": "18"}, errors.VideoError, "crf '18': must be a whole number"),
        (FRAMES, "cat.mp4", {"codec": ["h264"]}, errors.VideoError, r"codec \['h264'\] is not known"),
        (FRAMES, "cat.mp4", {"comment": 5}, errors.VideoError, "comment 5 must be a text, not int"),
        (FRAMES, "cat.mp4", {"num_frames": "2"}, errors.VideoError, "num_frames '2': must be a whole number"),
    ],
)
def test_a_video_that_cannot_be_written_as_asked_leaves_nothing_behind(
    tmp_path, monkeypatch, frames, path, arguments, kind, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        export_video(frames, path, **{"fps": 8, **arguments})
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_say_how_a_video_is_written(tmp_path):
    path = export_video(FRAMES, tmp_path / "cat.mp4", np.float32(8), crf=np.int64(30), num_frames=np.int64(2))
    assert probe_video(path).num_frames == 2


@pytest.mark.parametrize("read", [probe_video, read_comment, read_video])
def test_a_video_is_read_from_a_path_alone(read):
    with pytest.raises(errors.ArgumentError, match="path 5: must be a text"):
        read(5)


Q = torch.randn(1, 128, 2, 8, generator=torch.Generator().manual_seed(0))
WINDOW = torch.eye(2, dtype=torch.bool)


@pytest.mark.parametrize("select", [nabla_mask, nablaT_v2])
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({0: Q.numpy()}, errors.BackendError, "query: must be a tensor, not ndarray"),
        ({1: None}, errors.BackendError, "key: must be a tensor, not NoneType"),
        ({2: WINDOW.numpy()}, errors.BackendError, "sta_mask: must be a tensor, not ndarray"),
        ({0: Q.long(), 1: Q.long()}, errors.BackendError, "query .* of torch.int64: must hold floating point"),
        ({0: Q[:, :0], 1: Q[:, :0]}, errors.BackendError, "must hold floating point numbers"),
        ({2: WINDOW.float()}, errors.BackendError, r"sta_mask.bool\(\) works"),
        ({2: WINDOW.to("meta")}, errors.BackendError, "are on cpu, cpu, meta: use one"),
        ({2: WINDOW[:1]}, errors.BackendError, "does not fit 2 blocks"),
        ({3: "0.9"}, errors.SettingsError, "P='0.9': the kept mass must be a number in"),
        ({3: 1.5}, errors.SettingsError, "P=1.5"),
        ({3: NAN}, errors.SettingsError, "P=nan"),
    ],
)
def test_what_no_selection_can_be_made_of_is_refused(select, changes, kind, message):
    given = [changes.get(position, value) for position, value in enumerate((Q, Q, WINDOW, 0.9))]
    with pytest.raises(kind, match=message):
        select(*given)


@pytest.mark.parametrize(
    ("grid", "window"),
    [((2.5, 1, 1), (1, 1, 1)), ((2, 1, 1), (1.0, 1, 1)), (3, (1, 1, 1)), ((2, 1), (1, 1, 1)), ((2, 1, 1), None)],
)
def test_a_window_mask_has_three_whole_sizes(grid, window):
    with pytest.raises(errors.BackendError, match="must be three sizes each, whole numbers of at least 1"):
        sta_mask(grid, window)


def test_sizes_of_numpy_make_the_same_window_mask():
    assert torch.equal(sta_mask(np.array([3, 2, 2]), np.array([2, 1, 3])), sta_mask((3, 2, 2), (2, 1, 3)))


def test_metadata_refuse_a_mass_that_is_no_number():
    with pytest.raises(errors.SettingsError, match=r"P='0\.9'"):
        NablaAttentionMetadataBuilder().build(0, WINDOW, "0.9", (2, 8, 8))


def test_a_backend_is_chosen_by_its_name_and_a_whole_head_size():
    with pytest.raises(errors.BackendError, match=r"unknown attention backend \['SDPA'\]"):
        get_attention_backend(["SDPA"])
    with pytest.raises(errors.BackendError, match="head size '64': multiples of 8"):
        get_attention_backend("NABLA_ATTN", head_size="64")
