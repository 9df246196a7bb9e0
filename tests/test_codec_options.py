"""`--codec` and `--crf`: the file that was asked for is written, described, repeated, and decoded to again."""

import json

import pytest

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline.export import VideoInfo, probe_video, read_comment, read_video

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "5", "--steps", "1"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--prompt", "a cat", "--seed", "5"]
SUFFIXES = {"h264": ".mp4", "h265": ".mp4", "gif": ".gif", "frames": ""}
DEMO = load_preset("demo")
PRESET = DEMO.local_folder.with_suffix(".yaml")


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else path.read_bytes()


@pytest.mark.parametrize("codec", SUFFIXES)
def test_each_codec_writes_its_file_whose_record_repeats_the_bytes(here, tmp_path, codec):
    code, out, err = here(*QUICK, "--codec", codec)
    assert code == 0, err
    made = tmp_path / f"a-cat-5{SUFFIXES[codec]}"
    assert out.startswith(f"{made.name}: 64x64, 5 frames")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({made.name, "a-cat-5.json"})
    info = probe_video(made)
    assert (info.width, info.height, info.num_frames) == (64, 64, 5)
    assert abs(info.fps - DEMO.fps) < 0.2  # a GIF counts in 1/100 s
    record = json.loads(read_comment(made))
    assert record == json.loads((tmp_path / "a-cat-5.json").read_text())
    assert (record["codec"], record["crf"]) == (codec, {"h264": 18, "h265": 20}.get(codec))
    again = tmp_path / f"again{SUFFIXES[codec]}"
    code, _, err = here("--from", made, "--output", again.name)
    assert code == 0, err
    assert content(again) == content(made)
    (tmp_path / "a-cat-5.json").unlink()
    for output, names in ([], ("a-cat-5-2", "a-cat-6")), (["--output", f"b{made.suffix}"], ("b-1", "b-2")):
        _, out, _ = here(*QUICK, "--codec", codec, "--num-videos", "2", *output, "--dry-run", "--json")
        assert [each["file"] for each in json.loads(out)["outputs"]] == [f"{name}{made.suffix}" for name in names]


def test_the_quality_changes_the_file_and_is_recorded(here, tmp_path):
    sizes = {}
    for crf in (0, 40):
        assert here(*QUICK, "--crf", crf, "--output", f"{crf}.mp4")[0] == 0
        record = json.loads(read_comment(tmp_path / f"{crf}.mp4"))
        assert (record["codec"], record["crf"]) == ("h264", crf)
        sizes[crf] = (tmp_path / f"{crf}.mp4").stat().st_size
    assert sizes[0] > sizes[40]


def test_the_outputs_suffix_chooses_gif_and_another_codec_beside_a_record_has_its_own_quality(here, tmp_path):
    assert here(*QUICK, "--output", "cat.GIF")[0] == 0
    assert json.loads(read_comment(tmp_path / "cat.GIF"))["codec"] == "gif"
    assert here(*QUICK, "--crf", "30", "--output", "cat.mp4", "--overwrite")[0] == 0
    code, _, err = here("--from", "cat.mp4", "--codec", "h265", "--output", "other.mp4")
    assert code == 0, err
    assert json.loads(read_comment(tmp_path / "other.mp4"))["crf"] == 20
    code, _, err = here("--from", "cat.mp4", "--codec", "gif", "--crf", "30", "--output", "other.gif")
    assert code == 2
    assert "crf 30: codec 'gif' has no such quality; leave it out (h264 and h265 take it)" in err


def test_kept_latents_are_decoded_to_another_codec_beside_the_first_file(here, tmp_path):
    assert here(*QUICK, "--output", "cat.mp4", "--keep-state")[0] == 0
    before = [(tmp_path / name).read_bytes() for name in ("cat.json", "cat.mp4")]
    assert here("--decode-only", "cat.k5", "--codec", "frames", "--output", "cat")[0] == 2  # cat.json is cat.mp4's
    for overwrite, made in ([], "cat-2"), ([], "cat-3"), (["--overwrite"], "cat-2"):
        code, out, err = here("--decode-only", "cat.k5", "--codec", "frames", *overwrite)
        assert code == 0, err
        assert out.startswith(f"{made}: 64x64, 5 frames")
        assert json.loads((tmp_path / f"{made}.json").read_text())["codec"] == "frames"
    assert [(tmp_path / name).read_bytes() for name in ("cat.json", "cat.mp4")] == before
    assert probe_video(tmp_path / "cat-2") == VideoInfo(64, 64, DEMO.fps, 5)
    assert here("--decode-only", "cat.k5", "--crf", "30", "--output", "small.mp4")[0] == 0
    assert json.loads(read_comment(tmp_path / "small.mp4"))["crf"] == 30
    # The frames are the pixels that the MP4 was made from: what differs is its loss.
    exact, lossy = (read_video(tmp_path / name)[0].astype(float) for name in ("cat-2", "cat.mp4"))
    assert 0 < abs(exact - lossy).mean() < 5


def test_the_outputs_suffix_chooses_the_codec_beside_a_state_and_a_record_too(here, tmp_path):
    assert here(*QUICK, "--crf", "30", "--codec", "h265", "--output", "cat.mp4", "--keep-state")[0] == 0
    for source in (["--decode-only", "cat.k5"], ["--from", "cat.mp4"]):
        for output, codec, crf in (("b.gif", "gif", None), ("b.mp4", "h265", 30)):
            code, _, err = here(*source, "--output", output, "--overwrite")
            assert code == 0, err
            record = json.loads(read_comment(tmp_path / output))
            assert (record["codec"], record["crf"]) == (codec, crf)
        code, _, err = here(*source, "--output", "c.gif", "--codec", "h264")
        assert (code, "c.mp4 works for codec 'h264', c.gif for 'gif'" in err) == (2, True)
    code, _, err = here("--from", "b.gif", "--output", "c.mp4", "--overwrite", "--dry-run")
    assert code == 0, err


def test_a_state_alone_is_decoded_under_its_own_name(here, tmp_path):
    assert here(*QUICK, "--output", "cat.mp4", "--keep-state")[0] == 0
    for name in ("cat.mp4", "cat.json"):
        (tmp_path / name).unlink()
    for name in ("cat.gif", "cat-2.gif"):
        code, out, err = here("--decode-only", "cat.k5", "--codec", "gif")
        assert (code, out.partition(":")[0]) == (0, name), err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--codec", "h266"], "invalid choice: 'h266'"),
        (["--codec", "gif", "--output", "a.mp4"], "a.gif works for codec 'gif', a.mp4 for 'h264' and 'h265'"),
        (["--codec", "h265", "--output", "a.gif"], "a.mp4 works for codec 'h265', a.gif for 'gif'"),
        (["--codec", "frames", "--output", "a.mp4"], "the video's name must be that of a folder, without a suffix"),
        (["--output", "a.mov"], "a.mp4 works for codec 'h264'"),
        (["--output", "full/.GIF"], "full/.GIF: the video's name has nothing before its suffix '.GIF': full/video.GIF"),
        (["--crf", "52"], "crf 52: must be a whole number from 0 to 51; 51 works"),
        (["--crf", "-1", "--codec", "h265"], "crf -1: must be a whole number from 0 to 51; 0 works"),
        (["--crf", "1", "--codec", "frames"], "crf 1: codec 'frames' has no such quality"),
        (["--codec", "frames", "--output", "full"], "output full: exists; choose another name or add --overwrite"),
        (["--codec", "frames", "--output", "full", "--overwrite"], "full holds precious.txt beside frames"),
        (["--codec", "frames", "--output", "file", "--overwrite"], "file is not a folder"),
        (["--codec", "frames", "--output", "link", "--overwrite"], "link is not a folder"),
        (["--codec", "gif", "--config", "fast.yaml"], "fps must be a number from 1/655 to 50 with codec 'gif', got 60"),
        (["--output", "full.gif"], "is a folder; name a file in it, such as full.gif/video.gif"),
    ],
)
def test_what_a_codec_cannot_do_is_refused_with_what_works(here, tmp_path, argv, problem):
    for name in ("full", "full.gif"):
        (tmp_path / name).mkdir()
    (tmp_path / "full/precious.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("full")
    (tmp_path / "fast.yaml").write_text(PRESET.read_text().replace("./demo", str(DEMO.model)).replace("8.0", "60"))
    before = sorted(tmp_path.rglob("*"))
    code, _, err = here(*QUICK, *argv)
    assert code == 2
    assert problem in err, err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_frames_is_replaced_when_asked(here, tmp_path):
    assert here(*QUICK, "--codec", "frames", "--output", "cat")[0] == 0
    code, _, err = here(*QUICK, "--codec", "frames", "--output", "cat")
    assert code == 2
    assert "cat: exists; choose another name or add --overwrite" in err
    assert here(*QUICK, "--codec", "frames", "--output", "cat", "--num-frames", "1", "--overwrite")[0] == 0
    assert sorted(path.name for path in (tmp_path / "cat").iterdir()) == ["frame-0000.png", "metadata.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat", "cat.json"]
