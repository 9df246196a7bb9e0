"""A file of prompts is read row by row: a bad row is told with its line, a bad file before anything else happens."""

import pytest

from kandinsky5_nabla.scripts._prompts import Row, read_prompts

RED, DOG = "a red cat", "a dog, running"
LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.txt", f"{RED}\n\n  {DOG} \r\n", [Row(1, RED), Row(3, DOG)]),
        ("a.TXT", f"\ufeff{RED}", [Row(1, RED)]),
        ("a.csv", f'prompt\n{RED}\n\n"{DOG}"\n', [Row(2, RED), Row(4, DOG)]),
        ("a.csv", f"prompt\r{RED}\r", [Row(2, RED)]),
        (
            "a.csv",
            f'\ufeffSeed, Prompt ,height\r\n7,{RED},64\r\n, ,\r\n,"{DOG}",\r\n',
            [Row(2, RED, {"seed": 7, "height": 64}), Row(4, DOG)],
        ),
        ("a.csv", 'prompt,seed\n"two\nlines",1\nb,2\n', [Row(2, "two\nlines", {"seed": 1}), Row(4, "b", {"seed": 2})]),
        (
            "a.jsonl",
            f'{{"prompt": "{RED}", "seed": 7, "width": null}}\n\n{{"prompt": "", "num_frames": "5"}}',
            [Row(1, RED, {"seed": 7}), Row(3, "", {"num_frames": 5})],
        ),
        ("a.jsonl", '{"prompt": "a", "negative_prompt": ""}', [Row(1, "a", {"negative_prompt": ""})]),
        ("a.jsonl", '{"prompt": " a\u2028b "}\r\n{"prompt": "c"}', [Row(1, "a\u2028b"), Row(2, "c")]),
        ("a.jsonl", '{"prompt": "a"}\r{"prompt": "c"}', [Row(1, "a"), Row(2, "c")]),
        ("a.txt", "a\u2028b\x0bc\x85d\r\ne\r\rf\n", [Row(1, "a\u2028b\x0bc\x85d"), Row(2, "e"), Row(4, "f")]),
    ],
)
def test_each_format_gives_its_rows_with_their_lines(tmp_path, name, text, rows):
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("a.csv", "prompt,seed\na,1\nb,x\n", 3, "seed 'x': must be a whole number"),
        ("a.csv", "prompt,seed\na,1.5\n", 2, "seed '1.5': must be a whole number"),
        ("a.csv", "prompt,seed\n,1\n", 2, "has no prompt"),
        ("a.csv", "prompt,seed\na, b,1\n", 2, "has 3 values for 2 columns; quote values with commas"),
        ("a.csv", "prompt,seed\na\n", 2, "has 1 values for 2 columns"),
        ("a.csv", 'prompt\n"a" b\n', 2, "is not CSV"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', 2, "is not JSON"),
        ("a.jsonl", '["a"]', 1, 'is no object such as {"prompt": "a cat"}: ["a"]'),
        ("a.jsonl", '{"text": "a"}', 1, "there is no column 'text'"),
        ("a.jsonl", '{"prompt": "a", "sede": 1}', 1, "there is no column 'sede': seed is meant? they are prompt, "),
        ("a.jsonl", '{"prompt": "a", "foo": 1}', 1, "there is no column 'foo': they are prompt, "),
        ("a.jsonl", '{"prompt": ["a"]}', 1, 'prompt ["a"]: must be text'),
        ("a.jsonl", f'{{"prompt": ["{LONG}"]}}', 1, f'prompt ["{LONG[:58]}...: must be text'),
        ("a.jsonl", '{"prompt": "a", "seed": "x"}', 1, 'seed "x": must be a whole number'),
        ("a.jsonl", '{"prompt": "a", "seed": true}', 1, "seed true: must be a whole number"),
        ("a.jsonl", '{"prompt": "a", "seed": NaN}', 1, "seed NaN: must be a whole number"),
        ("a.jsonl", '{"prompt": "a", "seed": 1, "prompt": "b"}', 1, "there are two values of 'prompt'"),
        ("a.jsonl", "[" * 100_000, 1, "is not JSON: maximum recursion depth"),
        ("a.jsonl", '{"prompt": "a", "seed": 1.0}', 1, "seed 1.0: must be a whole number"),
    ],
)
def test_a_bad_row_says_what_is_wrong_and_the_rows_around_it_are_read(tmp_path, name, text, line, problem):
    (tmp_path / name).write_text(
        text + ('\n{"prompt": "last"}' if name.endswith("jsonl") else "last" + ",7" * ("," in text))
    )
    rows = read_prompts(tmp_path / name)
    [bad] = [row for row in rows if row.problems]
    assert bad.line == line
    assert any(sentence.startswith(problem) for sentence in bad.problems), bad.problems
    assert rows[-1].prompt == "last"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.yaml", b"prompt: a", "must be a name that ends in .txt, .csv, .jsonl"),
        ("a", b"a", "must be a name that ends in .txt, .csv, .jsonl"),
        ("a.txt", b"\n \n", "has no prompt"),
        ("a.csv", b"prompt,seed\n", "has no prompt"),
        ("a.csv", b"", "the first row must name the columns, prompt among them"),
        ("a.csv", b"a cat\na dog\n", "the first row must name the columns, prompt among them; it is 'a cat'"),
        ("a.csv", b"prompt,sead\na,1\nb,2\n", "there is no column 'sead': seed is meant?"),
        ("a.csv", b"prompt,seed,seed\na,1,2\n", "there are two columns 'seed'"),
        ("a.txt", b"a\xffb", "byte 1 is not UTF-8; save the file in UTF-8"),
        ("missing.txt", None, "--prompts missing.txt: there is no such file"),
        (f"{'x' * 300}.txt", None, "x.txt: there is no such file"),
        (".", None, "must be a name that ends in .txt, .csv, .jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_as_a_whole_is_refused_before_anything(here, tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = here("--config", "demo", "--prompts", name, "--output", "videos")
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert problem in line
    assert name in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_such_a_name_cannot_be_read(here, tmp_path):
    (tmp_path / "a.txt").mkdir()
    code, _, err = here("--config", "demo", "--prompts", "a.txt", "--output", "videos")
    assert (code, err) == (2, "error: --prompts a.txt: cannot be read (Is a directory)\n")


def test_each_size_of_the_rows_is_cautioned_against_once(here, tmp_path):
    (tmp_path / "a.csv").write_text("prompt,width\na cat,128\na dog,128\na cow,256\n")
    code, _, err = here("--config", "demo", "--device", "cpu", "--prompts", "a.csv", "--height", "256", "--dry-run")
    warnings = [line.partition(" is no size")[0] for line in err.splitlines() if line.startswith("warning: ")]
    assert (code, warnings) == (0, ["warning: 256x128 (height x width)"])  # the demo was trained for 256x256
