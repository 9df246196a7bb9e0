"""Saved embeddings come back as they were and make the same video; whatever else is in the file is refused."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kandinsky5_nabla.pipeline.embeddings import split_rows
from kandinsky5_nabla.pipeline.embeds_file import EncodedTexts, check_fits, load_embeds, save_embeds
from kandinsky5_nabla.pipeline.state import save_state
from kandinsky5_nabla.pipeline.text import TextEmbeddings

PROMPTS = ["a red square", "a  blue circle, moving up — fast"]
NEGATIVE = "static"
ORIGIN = {"model": "owner/name", "revision": "0123abc", "dtype": "nf4"}
CONFIG = {"in_text_dim": 6, "in_text_dim2": 4}
PARTS = ("prompt_embeds", "mask", "pooled")


def row(seed, L=5, real=5, dtype=torch.float32):
    """Embeddings of one prompt that is padded to L tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(L)[None] < real
    embeds = torch.randn(1, L, 6, generator=generator).to(dtype) * mask[..., None]
    return TextEmbeddings(embeds, mask, torch.randn(1, 4, generator=generator).to(dtype))


@pytest.fixture
def texts():
    return EncodedTexts({PROMPTS[0]: row(1), PROMPTS[1]: row(2, L=7, real=7)}, (NEGATIVE, row(3)))


@pytest.fixture
def file(tmp_path, texts):
    return save_embeds(tmp_path / "prompts.safetensors", texts, **ORIGIN)


def same(a: TextEmbeddings, b: TextEmbeddings) -> bool:
    return all(torch.equal(getattr(a, part), getattr(b, part)) for part in PARTS)


def rewritten(file, tensors=lambda tensors: tensors, **metadata):
    """The same file with other tensors or with other values in its metadata; None removes one."""
    with safe_open(file, framework="pt") as opened:
        before = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        values = dict(opened.metadata())
    values |= {name: json.dumps(value) for name, value in metadata.items()}
    save_file(tensors(before), file, metadata={name: value for name, value in values.items() if value != '"gone"'})
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_their_embeddings_and_their_origin_come_back(tmp_path, dtype):
    texts = EncodedTexts({PROMPTS[0]: row(1, dtype=dtype), PROMPTS[1]: row(2, dtype=dtype)}, (NEGATIVE, row(3)))
    loaded = load_embeds(save_embeds(tmp_path / "prompts.safetensors", texts, **ORIGIN))
    assert list(loaded.texts.prompts) == PROMPTS
    assert all(same(loaded.texts.prompts[prompt], texts.prompts[prompt]) for prompt in PROMPTS)
    assert loaded.texts.negative[0] == NEGATIVE
    assert same(loaded.texts.negative[1], texts.negative[1])
    assert (loaded.model, loaded.revision, loaded.dtype) == ("owner/name", "0123abc", "nf4")
    assert re.match(r"\d+\.\d+", loaded.package)


def test_a_negative_prompt_and_a_commit_may_be_missing(tmp_path, texts):
    path = tmp_path / "prompts.safetensors"
    loaded = load_embeds(save_embeds(path, EncodedTexts(texts.prompts), model="a folder", dtype="bfloat16"))
    assert loaded.texts.negative is None
    assert loaded.revision is None


def test_a_run_with_loaded_embeddings_equals_the_run_with_the_prompts_bit_for_bit(tmp_path, pipe):
    size = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 1, "seed": 7, "output_type": "latent"}
    rows = split_rows(pipe.encode_prompt([*PROMPTS, NEGATIVE]), [1, 1, 1])  # the short ones are padded here
    texts = EncodedTexts(dict(zip(PROMPTS, rows[:2], strict=True)), (NEGATIVE, rows[2]))
    loaded = load_embeds(save_embeds(tmp_path / "prompts.safetensors", texts, **ORIGIN))
    check_fits(loaded, pipe.transformer.config)
    for prompt in PROMPTS:
        given = {}
        for prefix, text in {"": loaded.texts.prompt(prompt), "negative_": loaded.texts.negative[1]}.items():
            given |= {
                f"{prefix}prompt_embeds": text.prompt_embeds,
                f"{prefix}prompt_embeds_mask": text.mask,
                f"{prefix}pooled_prompt_embeds": text.pooled,
            }
        expected = pipe(prompt, negative_prompt=NEGATIVE, **size).frames
        assert torch.equal(pipe(**given, **size).frames, expected)


def test_one_text_may_be_prompt_and_negative_prompt(tmp_path):
    embeds = row(1)
    texts = EncodedTexts({"a": embeds, "b": embeds}, ("a", embeds))
    loaded = load_embeds(save_embeds(tmp_path / "a.safetensors", texts, **ORIGIN)).texts
    assert all(same(each, embeds) for each in loaded.rows().values())
    assert len(loaded.rows()) == 3


def test_padding_is_not_saved(tmp_path):
    loaded = load_embeds(save_embeds(tmp_path / "a.safetensors", EncodedTexts({"a": row(1, L=9, real=4)}), **ORIGIN))
    assert loaded.texts.prompts["a"].prompt_embeds.shape == (1, 4, 6)
    assert loaded.texts.prompts["a"].mask.all()


def test_prompts_are_found_by_what_the_encoders_read_of_them(texts):
    assert same(texts.prompt(" a blue circle, moving\nup — fast "), texts.prompts[PROMPTS[1]])
    assert texts.problems(["a red   square"], " static ") == []
    assert texts.problems(PROMPTS, None) == []


def test_what_a_run_lacks_is_named(texts):
    missing, other = texts.problems(["a red square", "a dog"], "blurred")
    assert "'a dog'" in missing
    assert "'static'" in other
    assert "'blurred'" in other
    unguided = EncodedTexts(texts.prompts)
    (problem,) = unguided.problems(PROMPTS, "blurred")
    assert "no negative prompt" in problem
    assert unguided.problems(PROMPTS, None) == []


def test_a_file_is_overwritten_only_when_asked(file, texts):
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="exists"):
        save_embeds(file, EncodedTexts({"other": row(9)}), **ORIGIN)
    assert file.read_bytes() == before
    save_embeds(file, EncodedTexts({"other": row(9)}), **ORIGIN, overwrite=True)
    assert list(load_embeds(file).texts.prompts) == ["other"]


def with_nan(texts, part):
    tensor = getattr(texts, part).clone()
    tensor.view(-1)[-1] = torch.nan
    return TextEmbeddings(**{name: getattr(texts, name) for name in PARTS} | {part: tensor})


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (with_nan(row(1), "prompt_embeds"), "NaN or infinity"),
        (with_nan(row(1), "pooled"), "NaN or infinity"),
        (row(1, real=0), "no real token"),
        (TextEmbeddings(*(torch.cat([getattr(row(1), part)] * 2) for part in PARTS)), r"must be \(1, L, D\)"),
        (TextEmbeddings(row(1).prompt_embeds, row(1).mask.long(), row(1).pooled), "must be floating point, bool"),
        (TextEmbeddings(row(1).prompt_embeds, row(1).mask, row(1).pooled[:, :3]), "different widths"),
    ],
)
def test_embeddings_that_nothing_could_use_are_not_saved(tmp_path, bad, reason):
    with pytest.raises(ValueError, match=reason):
        save_embeds(tmp_path / "a.safetensors", EncodedTexts({"a": row(0), "b": bad}), **ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_no_prompts_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="no prompt"):
        save_embeds(tmp_path / "a.safetensors", EncodedTexts({}), **ORIGIN)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load_embeds(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        load_embeds(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1], ids=["empty", "stub", "length", "header", "last byte"])
def test_a_file_that_is_cut_short_is_named(file, size):
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"prompts\.safetensors is cut short"):
        load_embeds(file)


@pytest.mark.parametrize(
    "content", [b"no tensors at all, only text", bytes(range(256)) * 9, b"\xff" * 64, b"PK\x03\x04zip"]
)
def test_garbage_is_named(file, content):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"prompts\.safetensors is cut short or damaged, or holds no embeddings"):
        load_embeds(file)


def test_safetensors_files_of_other_kinds_are_refused(tmp_path):
    latents = save_state(tmp_path / "a.safetensors", {"latents": torch.zeros(1, 1, 2, 2, 8), "completed": 0})
    weights = tmp_path / "weights.safetensors"
    save_file({"0.prompt_embeds": torch.zeros(1, 1, 6)}, weights, metadata={"format": "pt"})
    bare = tmp_path / "bare.safetensors"
    save_file({"0.prompt_embeds": torch.zeros(1, 1, 6)}, bare)
    for path in (latents, weights, bare):
        with pytest.raises(ValueError, match=f"{path.name} holds no embeddings that were saved here"):
            load_embeds(path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_of_the_format_is_refused(file, version):
    with pytest.raises(ValueError, match=r"prompts\.safetensors has the format .* reads 1"):
        load_embeds(rewritten(file, version=version))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompts", "gone"),
        ("prompts", []),
        ("prompts", ["a", 3]),
        ("prompts", ["a", "a"]),
        ("negative_prompt", 3),
        ("model", None),
        ("revision", ["a"]),
        ("dtype", "gone"),
        ("package", 1),
    ],
)
def test_metadata_that_cannot_be_right_are_named(file, name, value):
    with pytest.raises(ValueError, match=rf"prompts\.safetensors is damaged: its metadata has no readable {name}"):
        load_embeds(rewritten(file, **{name: value}))


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: without(tensors, "1.mask"), r"1\.mask is missing"),
        (lambda tensors: tensors | {"2.mask": tensors["1.mask"].clone()}, r"2\.mask is unexpected"),
        (lambda tensors: tensors | {"1.mask": tensors["1.mask"][:, 1:].contiguous()}, r"1: shapes"),
        (lambda tensors: tensors | {"negative.pooled": torch.zeros(1, 5)}, "different widths"),
        (lambda tensors: tensors | {"0.pooled": torch.full((1, 4), torch.inf)}, "0: NaN or infinity"),
        (lambda tensors: tensors | {"0.pooled": torch.zeros(1, 4, dtype=torch.int8)}, "0: dtypes"),
    ],
)
def test_tensors_that_do_not_belong_to_the_prompts_are_named(file, change, reason):
    with pytest.raises(ValueError, match=rf"prompts\.safetensors is damaged: .*{reason}"):
        load_embeds(rewritten(file, change))


def test_embeddings_of_other_widths_are_refused_with_both(file):
    loaded = load_embeds(file)
    check_fits(loaded, CONFIG)
    for name in CONFIG:
        with pytest.raises(ValueError, match=r"prompts\.safetensors has embeddings 6 and 4 wide, of owner/name.*99"):
            check_fits(loaded, CONFIG | {name: 99})
