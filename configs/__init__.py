"""Presets: what each checkpoint was trained and published with, as data."""

from .preset import Preset, find_preset, load_preset, preset_names

__all__ = ["Preset", "find_preset", "load_preset", "preset_names"]
