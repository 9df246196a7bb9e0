"""What is said of files that are nearly right, and of texts of any length, as a user meets it on the command line."""

import json
import shutil

import pytest

from kandinsky5_nabla.pipeline.expand import expand_prompts

QUICK = ["--config", "demo", "--height", "64", "--width", "64", "--num-frames", "5", "--steps", "1"]
QUICK += ["--attention", "NABLA_REFERENCE", "--device", "cpu", "--prompt", "a cat", "--seed", "5"]
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def make(here):
    def run(*argv):
        code, _, err = here(*argv)
        assert code == 0, err

    return run


@pytest.fixture
def problem(here):
    """Returns the only problem of a command line that is refused, with its kind."""

    def run(*argv):
        code, out, _ = here(*argv, "--json")
        error = json.loads(out)["error"]
        assert (code, len(error["problems"])) == (2, 1), error
        return error["kinds"][0], error["problems"][0]

    return run


def test_a_record_or_settings_that_an_editor_has_saved_with_a_mark_are_read(make, tmp_path):
    make(*QUICK, "--codec", "frames", "--output", "cat", "--keep-state")
    paths = [tmp_path / name for name in ("cat.json", "cat/metadata.json", "cat.k5/settings.json")]
    for path in paths:
        path.write_bytes(BOM + path.read_bytes())
    make("--from", "cat.json", "--output", "from-record", "--dry-run")
    make("--from", "cat", "--output", "from-video", "--dry-run")
    make("--decode-only", "cat.k5", "--output", "decoded")
    assert (tmp_path / "decoded/frame-0004.png").read_bytes() == (tmp_path / "cat/frame-0004.png").read_bytes()


def test_a_file_of_a_folder_of_frames_says_that_the_folder_is_meant(make, problem, tmp_path):
    make(*QUICK, "--codec", "frames", "--output", "cat")
    for name in ("cat/metadata.json", "cat/frame-0000.png", "cat/frame-0004.png"):
        said = f"--from {name}: is a part of the video in a folder of frames; name the folder, cat"
        assert problem("--from", name) == ("RecordError", said)
    shutil.copy(tmp_path / "cat.json", tmp_path / "metadata.json")  # the record of a video of that name
    make("--from", "metadata.json", "--output", "again", "--dry-run")
    (tmp_path / "cat/metadata.json").write_text("[" * 100_000)
    kind, said = problem("--from", "cat")
    assert (kind, "cat is not a complete video: its metadata.json is damaged" in said) == ("RecordError", True)


def test_a_file_that_is_not_there_is_of_that_kind_whatever_it_is_for(problem):
    for option in ("--prompts", "--preview", "--from"):
        name = "nix.txt" if option == "--prompts" else "nix.json"
        argv = [] if option == "--from" else ["--config", "demo", "--device", "cpu"]
        kind, said = problem(*argv, *(["--prompt", "a cat"] if option == "--preview" else []), option, name)
        assert (kind, said.startswith(f"{option} {name}: there is no such file")) == ("NotFoundError", True)


def test_what_is_wrong_with_the_text_of_a_state_is_an_error_of_the_state(make, problem, tmp_path):
    make(*QUICK, "--output", "cat.mp4", "--keep-state")
    text = tmp_path / "cat.k5/text.safetensors"
    text.write_bytes(text.read_bytes()[:-1])
    said = "cat.k5/text.safetensors is cut short or damaged, or holds no encoded text"
    assert problem("--resume", "cat.k5") == ("StateError", f"--resume cat.k5: {said}")
    text.unlink()
    said = "cat.k5 is damaged: there is no cat.k5/text.safetensors"
    assert problem("--decode-only", "cat.mp4") == ("StateError", f"--decode-only cat.mp4: {said}")


def test_a_warning_shows_the_beginning_of_a_long_prompt(pipe):
    long = "words " * 20_000
    with pytest.warns(UserWarning, match="is detailed already") as said:
        assert expand_prompts(pipe, long) == [long]
    assert str(said[0].message) == (
        f'the prompt "{long[:60]}..." is used as it is: it has 20000 words and is detailed already'
    )
