"""The Kandinsky 5 diffusion transformer and the text encoder, loaded from published checkpoints."""
