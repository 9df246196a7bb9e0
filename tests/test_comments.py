"""Comments: any text goes into a video and comes back exactly, and nothing else does."""

import random

import numpy as np
import pytest
from PIL import Image

from kandinsky5_nabla.pipeline.export import export_video, read_comment, read_video

FRAMES = np.full((1, 16, 16, 3), 90, np.uint8)
PATHS = {"h264": "video.mp4", "h265": "video.mp4", "gif": "video.gif", "frames": "video"}

TEXTS = {
    "one letter": "x",
    "a record": '{"prompt": "a \\"cat\\"\\n= ; # кот 🐈", "seed": 7}',
    "syntax of ffmetadata": "=;#\\ =;#\\\n;a comment\n#another\ncomment=other",
    "a section": "[STREAM]\ncomment=other\n",
    "the header": ";FFMETADATA1\ncomment=other",
    "a backslash": "\\",
    "a backslash at the end": "C:\\video\\",
    "a backslash and a newline": "a\\\nb\\\n",
    "newlines": "\n\na\n\n",
    "newlines of all systems": "a\rb\r\nc\n\rd\r",
    "spaces": "  a\t b  \t",
    "quotes": "'a' \"b\" `c` $HOME %s {} $(d)",
    "Cyrillic, emoji, right to left, composed": "Кот 🐈‍⬛ قطة e\u0301 \u2028\x85",
    "controls": "\x01\x1b[31m\x7f\b",
    "10,000 characters": "кот=;#\\\n🐈" * 1250,
    "a GIF's sub-block exactly": "x" * 255,
    "more than an argument may hold": "x" * 200_000,
}

HOSTILE = "=;#\\\\\\\n\r\"'[] \tax0кé🐈"


def random_text(seed):
    rng = random.Random(seed)
    return "".join(rng.choice(HOSTILE) for _ in range(rng.choice([1, 2, 3, 5, 8, 40, 600])))


def comment_after_export(folder, codec, text):
    return read_comment(export_video(FRAMES, folder / PATHS[codec], codec=codec, comment=text))


@pytest.mark.parametrize("codec", PATHS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_back_exactly(tmp_path, codec, name):
    assert comment_after_export(tmp_path, codec, TEXTS[name]) == TEXTS[name]


@pytest.mark.parametrize("codec", ["h264", "gif", "frames"])
@pytest.mark.parametrize("seed", range(20))
def test_random_texts_of_hostile_characters_come_back_exactly(tmp_path, codec, seed):
    text = random_text(seed)
    assert comment_after_export(tmp_path, codec, text) == text


@pytest.mark.parametrize("codec", PATHS)
def test_a_comment_is_plain_utf8_in_the_file_and_changes_no_pixel(tmp_path, codec):
    text = 'кот 🐈 "q" = ; #'
    path = export_video(FRAMES, tmp_path / PATHS[codec], codec=codec, comment=text)
    file = path / "metadata.json" if codec == "frames" else path
    written = text.replace('"', '\\"') if codec == "frames" else text
    assert written.encode() in file.read_bytes()
    pixels = read_video(path)[0]
    export_video(FRAMES, path, codec=codec, overwrite=True)
    assert read_comment(path) is None
    np.testing.assert_array_equal(read_video(path)[0], pixels)


@pytest.mark.parametrize("codec", PATHS)
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "the comment is empty"),
        ("ab\0c", "a NUL character at position 2"),
        ("a\udcffb", "not UTF-8"),
    ],
)
def test_a_text_that_no_file_can_hold_is_refused_and_leaves_nothing(tmp_path, codec, text, match):
    with pytest.raises(ValueError, match=match):
        export_video(FRAMES, tmp_path / PATHS[codec], codec=codec, comment=text)
    assert list(tmp_path.iterdir()) == []


def test_the_comment_of_another_programs_gif_is_read(tmp_path):
    path = tmp_path / "other.gif"
    images = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    images[0].save(path, save_all=True, append_images=images[1:], duration=100, comment="by Pillow")
    assert read_comment(path) == "by Pillow"


@pytest.mark.parametrize("name", ["missing.mp4", "missing.gif", "missing"])
def test_a_missing_video_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        read_comment(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"no video", b"GIF89a"])
def test_what_is_no_video_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.mp4"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.mp4 is not a complete video"):
        read_comment(path)
    with pytest.raises(ValueError, match=r"is not a complete video: it has no metadata\.json"):
        read_comment(tmp_path)
