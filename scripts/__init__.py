"""Programs of this project; `generate` is its command line."""
