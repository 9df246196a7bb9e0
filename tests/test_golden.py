"""The official code's numbers: transformer, block masks, token order, schedule and whole loops, in fp32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kandinsky5_nabla.attention import NablaAttentionMetadata, get_attention_backend, nabla_mask, sta_mask
from kandinsky5_nabla.attention.order import block_order
from kandinsky5_nabla.attention.selection import block_map
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.denoise import Guidance, denoise, make_attention_metadata
from kandinsky5_nabla.pipeline.schedule import make_sigmas
from kandinsky5_nabla.pipeline.text import TextEmbeddings

DATA = Path(__file__).parent / "data"
FORWARD_TOLERANCE = 1e-5  # absolute; fp32 sums in another order differ by 3e-6 on outputs of about 1
LOOP_TOLERANCE = 5e-6  # of the largest value
TIE_TOLERANCE = 1e-5  # blocks whose running sum is this near to 1 - P may fall on either side

CASES = json.loads((DATA / "dit_cases.json").read_text())
LOOPS = json.loads((DATA / "denoise_loop.json").read_text())
MASKS = json.loads((DATA / "nabla_masks.json").read_text())
NABLA_CASES = [name for name, case in CASES.items() if case["P"] is not None]


@pytest.fixture(scope="module")
def dit_tensors():
    return load_file(DATA / "dit_cases.safetensors")


def load_tiny(backend=None, **attention):
    config = json.loads((DATA / "dit_tiny.config.json").read_text())
    model = Kandinsky5Transformer(**config, **attention)
    model.load_state_dict(load_file(DATA / "dit_tiny.safetensors"), strict=True)
    if backend is not None:
        model.set_attention_backend(backend)
    return model.eval()


def metadata_of(case):
    if case["P"] is None:
        return None
    grid = (case["T"], case["H"] // 16, case["W"] // 16)
    window = sta_mask(grid, case["window_t_h_w"])[None, None]
    return NablaAttentionMetadata(0, window, case["P"], (case["T"], case["H"] // 2, case["W"] // 2))


def run_case(model, tensors, name):
    case = CASES[name]
    geometry = name.split("_")[0]
    with torch.no_grad():
        return model(
            tensors[f"in.{geometry}.hidden_states"][None],
            tensors[f"in.{geometry}.encoder_hidden_states"],
            tensors[f"in.{geometry}.pooled_projections"],
            torch.tensor([case["timestep"]]),
            scale_factor=case["scale_factor"],
            attn_metadata=metadata_of(case),
        ).sample[0]


@pytest.mark.parametrize("backend", ["NABLA_REFERENCE", "NABLA_ATTN"])
@pytest.mark.parametrize("name", CASES)
def test_the_transformer_gives_the_official_velocity(name, backend, dit_tensors):
    out = run_case(load_tiny(backend), dit_tensors, name)
    torch.testing.assert_close(out, dit_tensors[f"out.{name}"], rtol=0, atol=FORWARD_TOLERANCE)


@pytest.mark.parametrize("name", NABLA_CASES)
def test_dense_attention_fails_every_nabla_case_of_the_transformer(name, dit_tensors):
    """Otherwise the test above would prove nothing about the masks."""
    dense = {**CASES[name], "P": None}
    model = load_tiny()
    with torch.no_grad():
        geometry = name.split("_")[0]
        out = model(
            dit_tensors[f"in.{geometry}.hidden_states"][None],
            dit_tensors[f"in.{geometry}.encoder_hidden_states"],
            dit_tensors[f"in.{geometry}.pooled_projections"],
            torch.tensor([dense["timestep"]]),
            scale_factor=dense["scale_factor"],
        ).sample[0]
    assert (out - dit_tensors[f"out.{name}"]).abs().max() > 1e-2


@pytest.mark.parametrize("backend", ["NABLA_ATTN", "NABLA_REFERENCE"])
@pytest.mark.parametrize("name", NABLA_CASES)
def test_each_layer_keeps_the_official_blocks(name, backend, dit_tensors, monkeypatch):
    kept = []

    def record(self, query, key, value, lists, real_S):
        kept.append(lists.kept[0].clone())
        return attend(self, query, key, value, lists, real_S)

    impl = get_attention_backend(backend).get_impl_cls()
    attend = impl.attend
    monkeypatch.setattr(impl, "attend", record)
    run_case(load_tiny(backend), dit_tensors, name)
    assert len(kept) == 2
    for layer, kept_HNN in enumerate(kept):
        assert torch.equal(kept_HNN, dit_tensors[f"mask.{name}.layer{layer}"].bool())


def test_padding_behind_the_text_mask_changes_nothing(dit_tensors):
    model = load_tiny()
    mask = dit_tensors["in.textmask.encoder_attention_mask"]
    text = dit_tensors["in.textmask.encoder_hidden_states"]

    def run(text, mask):
        with torch.no_grad():
            return model(
                dit_tensors["in.g0.hidden_states"][None],
                text,
                dit_tensors["in.g0.pooled_projections"],
                torch.tensor([500.0]),
                encoder_attention_mask=mask,
                scale_factor=(1.0, 2.0, 2.0),
            ).sample[0]

    expected = dit_tensors["out.textmask_dense"]
    torch.testing.assert_close(run(text, mask), expected, rtol=0, atol=FORWARD_TOLERANCE)
    poisoned = torch.where(mask.bool()[..., None], text, torch.nan)
    torch.testing.assert_close(run(poisoned, mask), expected, rtol=0, atol=FORWARD_TOLERANCE)
    assert (run(text, None) - expected).abs().max() > 1e-3  # the garbage would matter if it were seen


@pytest.mark.parametrize("name", MASKS)
def test_nabla_mask_keeps_the_official_blocks(name):
    case, tensors = MASKS[name], load_file(DATA / "nabla_masks.safetensors")
    query, key = (tensors[f"{name}.{x}"].float().transpose(1, 2) for x in "qk")
    window = sta_mask((case["T"], case["Hblocks"], case["Wblocks"]), case["window_t_h_w"])
    assert torch.equal(window, tensors[f"{name}.sta"].bool().view_as(window))
    kept = nabla_mask(query, key, window, case["P"])
    differs = kept != tensors[f"{name}.mask"].bool()
    assert not (differs & ~may_fall_on_either_side(block_map(query, key), case["P"])).any()
    assert differs.sum() <= 2


def may_fall_on_either_side(map_BHNN, P):
    """Blocks whose running sum is within 1e-5 of 1 - P, or whose value ties with a neighbour's in the order."""
    ascending, order = map_BHNN.double().sort(-1)
    near = (ascending.cumsum(-1) - (1 - P)).abs() < TIE_TOLERANCE
    ties = torch.zeros_like(near)
    ties[..., 1:] |= ascending[..., 1:] == ascending[..., :-1]
    ties[..., :-1] |= ascending[..., 1:] == ascending[..., :-1]
    return torch.zeros_like(near).scatter(-1, order, near | ties)


@pytest.mark.parametrize(("shape", "order"), json.loads((DATA / "fractal_order.json").read_text()).items())
def test_block_order_is_the_official_order(shape, order):
    assert block_order(tuple(map(int, shape.split("x")))).tolist() == order


@pytest.mark.parametrize(("name", "times"), json.loads((DATA / "timesteps.json").read_text()).items())
def test_the_schedule_is_the_official_one(name, times):
    steps, shift = name.removeprefix("steps").split("_shift")
    sigmas = make_sigmas(int(steps), float(shift))
    torch.testing.assert_close(sigmas * 1000, torch.tensor(times), rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", ["NABLA_REFERENCE", "NABLA_ATTN"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_whole_loop_ends_at_the_official_latents(name, backend):
    loop, tensors = LOOPS[name], load_file(DATA / "denoise_loop.safetensors")
    attention = loop["attention"]
    is_nabla = attention["type"] == "nabla"
    windows = {f"attention_{axis}": attention.get(axis) for axis in ("wT", "wH", "wW")}
    model = load_tiny(attention_type="nabla" if is_nabla else "regular", **windows)
    if is_nabla:
        model.set_attention_backend(backend)
    noise = tensors["noise"][None]
    positive, negative = (
        TextEmbeddings(embeds, torch.ones(embeds.shape[:2], dtype=torch.bool), tensors[f"{prefix}pooled_prompt_embeds"])
        for prefix in ("", "negative_")
        for embeds in [tensors[f"{prefix}prompt_embeds"]]
    )
    latents = denoise(
        model,
        noise,
        make_sigmas(loop["steps"], loop["shift"]),
        Guidance(positive, negative if loop["guidance"] != 1 else None, loop["guidance"]),
        tuple(loop["scale_factor"]),
        make_attention_metadata(model, noise.shape[1:], attention.get("P"), "cpu"),
    )
    expected = tensors[f"latents.{name}"]
    assert (latents[0] - expected).abs().max() <= LOOP_TOLERANCE * expected.abs().max()
