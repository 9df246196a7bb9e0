"""What NABLA did in a run: the blocks that each layer kept, the arithmetic that this saved, and the time it took.

Legend: B batch, H heads, S tokens (those that pad frames to whole tiles included), D head dim, N = S / 64 blocks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..attention import NablaAttentionImpl, NablaAttentionMetadata
from ..configs.errors import BackendError, SettingsError
from ..models.layers import VisualBlock

if TYPE_CHECKING:
    from ..attention.lists import BlockLists
    from ..models.transformer import Kandinsky5Transformer


class MapChoice(NamedTuple):
    """Which block map to keep, each number from 0: that of the first video, in the step's first model call."""

    step: int
    layer: int
    head: int


@dataclass(frozen=True)
class AttentionRecord:
    """One layer in one model call.

    Attributes:
        step: index of the denoising step.
        call: index of the model call within the step: 0 is that of the prompt, 1 that of the negative prompt.
        layer: index of the visual block.
        batch: videos in the call.
        blocks: N, the blocks in a row of the block map.
        density: share of the blocks that were kept, over all videos, heads and rows.
        window_density: share of the blocks that the window alone would keep.
        row_min: fewest blocks kept in a row, of all videos and heads.
        row_max: most blocks kept in a row.
        seconds_selecting: time of choosing the blocks; the first call of a process may compile.
        seconds_attending: time of attending to them; likewise.
        dense_flops: what dense attention over the same S tokens computes, 4 * B * H * S**2 * D: two products of
            matrices, an addition and a multiplication each, as FlashAttention counts; the softmax is not counted.
        block_map: bool `[N, N]` on the CPU, query blocks as rows, where `recorded_attention` was asked for it.
    """

    step: int
    call: int
    layer: int
    batch: int
    blocks: int
    density: float
    window_density: float
    row_min: int
    row_max: int
    seconds_selecting: float
    seconds_attending: float
    dense_flops: int
    block_map: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def flops(self) -> int:
        """What attention over the kept blocks computes."""
        return round(self.dense_flops * self.density)


@contextmanager
def recorded_attention(
    transformer: Kandinsky5Transformer, map_of: MapChoice | None = None
) -> Iterator[list[AttentionRecord]]:
    """Yield a list that gets a record for each layer of each model call, in the order in which they run.

    The backend is the one chosen when this is entered; with one that is not NABLA nothing is recorded. On CUDA each
    layer is waited for, so that its seconds are its own. For a transformer that is not compiled as a whole.

    Args:
        transformer: whose visual blocks are watched.
        map_of: the block map to keep in its record; None keeps none.

    Raises:
        ValueError: if there is no such layer or head.
    """
    if map_of is not None:
        _check_choice(map_of, transformer)
    records: list[AttentionRecord] = []
    with ExitStack() as stack:
        for layer, impl in _nabla_layers(transformer):
            watch = _Watch(impl, layer, records, map_of)
            stack.enter_context(_watched(impl, select=watch.select, attend=watch.attend))
        yield records


@contextmanager
def watched_density(transformer: Kandinsky5Transformer) -> Iterator[Callable[[], float | None]]:
    """Yield a function that returns the density since its last call, the mean of all layers and model calls.

    It returns None where NABLA has not run. It alone waits for the device: this is for watching a run step by step,
    where `recorded_attention` measures it.
    """
    blocks = _Blocks()
    with ExitStack() as stack:
        for _, impl in _nabla_layers(transformer):
            stack.enter_context(_watched(impl, attend=blocks.counted(impl.attend)))
        yield blocks.density


def report_of(records: Sequence[AttentionRecord]) -> dict[str, Any]:
    """Return a report in plain values, ready for JSON.

    `totals`: the numbers of layers and steps; `density` and `window_density`, means over layers and model calls;
    `flops` and `dense_flops` (see `AttentionRecord`), and `flops_saved`, the share of the latter that was not needed;
    `seconds_selecting` and `seconds_attending`.
    `layers`: for each layer the least, mean and largest density of its steps, `window_density`, `blocks`, and the
    fewest and most blocks in a row.
    `steps_of_layers`: for each layer and step the same sums and means over its model calls, and their densities
    one by one.

    Raises:
        ValueError: if nothing was recorded.
    """
    if not records:
        raise BackendError("no attention was recorded: only NABLA is, with its metadata")
    by_step: dict[tuple[int, int], list[AttentionRecord]] = defaultdict(list)
    for record in records:
        by_step[record.layer, record.step].append(record)
    rows = [_row(by_step[key]) for key in sorted(by_step)]
    layers = sorted({row["layer"] for row in rows})
    totals = {"layers": len(layers), "steps": len({row["step"] for row in rows}), **_sums(records)}
    totals["flops_saved"] = 1 - totals["flops"] / totals["dense_flops"]
    of_layers = [_summary([row for row in rows if row["layer"] == layer]) for layer in layers]
    return {"totals": totals, "layers": of_layers, "steps_of_layers": rows}


class _Watch:
    """Stands in for `select` and `attend` of one layer's implementation."""

    def __init__(
        self, impl: NablaAttentionImpl, layer: int, records: list[AttentionRecord], map_of: MapChoice | None
    ) -> None:
        self._select, self._attend = impl.select, impl.attend
        self._layer, self._records = layer, records
        self._map_of = map_of if map_of is not None and map_of.layer == layer else None
        self._metadata: NablaAttentionMetadata | None = None
        self._call = 0
        self._seconds_selecting = 0.0

    def select(self, query: torch.Tensor, key: torch.Tensor, attn_metadata: NablaAttentionMetadata) -> BlockLists:
        # The calls of one step share its metadata; the same step of another run has metadata of its own.
        self._call = self._call + 1 if attn_metadata is self._metadata else 0
        self._metadata = attn_metadata
        lists, self._seconds_selecting = _timed(query.device, self._select, query, key, attn_metadata)
        return lists

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: BlockLists,
        real_S: torch.Tensor | None,
    ) -> torch.Tensor:
        out_BSHD, seconds = _timed(query.device, self._attend, query, key, value, lists, real_S)
        self._records.append(self._record(query, lists, seconds))
        return out_BSHD

    def _record(self, query: torch.Tensor, lists: BlockLists, seconds_attending: float) -> AttentionRecord:
        metadata = self._metadata
        assert metadata is not None, "attend comes after select"
        B, S, H, D = query.shape
        N = lists.kept.shape[-1]
        counts_BHN = _row_counts(lists)
        row_min, row_max = (int(count) for count in counts_BHN.aminmax())
        return AttentionRecord(
            step=metadata.current_timestep,
            call=self._call,
            layer=self._layer,
            batch=B,
            blocks=N,
            density=int(counts_BHN.sum()) / (B * H * N * N),
            window_density=int(metadata.sta_mask.count_nonzero()) / (N * N),
            row_min=row_min,
            row_max=row_max,
            seconds_selecting=self._seconds_selecting,
            seconds_attending=seconds_attending,
            dense_flops=4 * B * H * S**2 * D,
            block_map=self._map(lists, metadata.current_timestep),
        )

    def _map(self, lists: BlockLists, step: int) -> torch.Tensor | None:
        chosen = self._map_of
        if chosen is None or step != chosen.step or self._call != 0:
            return None
        return lists.kept[0, chosen.head].to("cpu", copy=True)  # the lists are overwritten by the next layer


class _Blocks:
    """Counts the blocks that are kept; the sum stays on the device until it is asked for."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | int = 0
        self._all = 0

    def counted(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the method with the blocks counted that it attends to."""

        def counting(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lists: BlockLists, real_S: torch.Tensor | None
        ) -> torch.Tensor:
            self._kept = self._kept + _row_counts(lists).sum()
            self._all += lists.kept.numel()
            return attend(query, key, value, lists, real_S)

        return counting

    def density(self) -> float | None:
        """Return the share of the blocks that were kept since the last call; None where there were none."""
        kept, every, self._kept, self._all = int(self._kept), self._all, 0, 0
        return kept / every if every else None


def _nabla_layers(transformer: Kandinsky5Transformer) -> Iterator[tuple[int, NablaAttentionImpl]]:
    """Yield the number and the implementation of each layer whose attention is NABLA's."""
    for layer, block in enumerate(transformer.visual_transformer_blocks):
        assert isinstance(block, VisualBlock)
        if isinstance(impl := block.self_attention.impl, NablaAttentionImpl):
            yield layer, impl


def _row_counts(lists: BlockLists) -> torch.Tensor:
    """Return the number of kept blocks in each row, int `[B, H, N]`.

    They are what the kernel walks through; a sum over `kept` would convert the whole map to integers first.
    """
    return lists.counts if lists.edge_counts is None else lists.counts + lists.edge_counts


@contextmanager
def _watched(impl: NablaAttentionImpl, **methods: Callable[..., Any]) -> Iterator[None]:
    """Put other methods in front of the implementation's, and take them away again whatever happens."""
    before = {name: vars(impl)[name] for name in methods if name in vars(impl)}  # another watch around this one
    vars(impl).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(impl)[name]
        vars(impl).update(before)


def _timed(device: torch.device, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return what a function returns and its seconds, those of the work that it left to the device included."""
    _finish(device)
    start = time.perf_counter()
    result = function(*arguments)
    _finish(device)
    return result, time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_choice(choice: MapChoice, transformer: Kandinsky5Transformer) -> None:
    config = transformer.config
    sizes = {"layer": config["num_visual_blocks"], "head": config["model_dim"] // sum(config["axes_dims"])}
    for name, size in sizes.items():
        if not 0 <= getattr(choice, name) < size:
            raise SettingsError(f"block map of {name} {getattr(choice, name)}: there are {size}, from 0 to {size - 1}")


def _sums(records: Sequence[AttentionRecord]) -> dict[str, Any]:
    return {
        "density": fmean(record.density for record in records),
        "window_density": fmean(record.window_density for record in records),
        "seconds_selecting": sum(record.seconds_selecting for record in records),
        "seconds_attending": sum(record.seconds_attending for record in records),
        "dense_flops": sum(record.dense_flops for record in records),
        "flops": sum(record.flops for record in records),
    }


def _row(records: Sequence[AttentionRecord]) -> dict[str, Any]:
    """Return the entry of one layer and step."""
    return {
        "layer": records[0].layer,
        "step": records[0].step,
        "blocks": records[0].blocks,
        "row_min": min(record.row_min for record in records),
        "row_max": max(record.row_max for record in records),
        "density_of_calls": [record.density for record in sorted(records, key=lambda record: record.call)],
        **_sums(records),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of one layer."""
    densities = [row["density"] for row in rows]
    return {
        "layer": rows[0]["layer"],
        "density_min": min(densities),
        "density": fmean(densities),
        "density_max": max(densities),
        "window_density": fmean(row["window_density"] for row in rows),
        "blocks": rows[0]["blocks"],
        "row_min": min(row["row_min"] for row in rows),
        "row_max": max(row["row_max"] for row in rows),
    }
