"""Malleus for Megatron: training jobs that survive slow GPUs. See docs/architecture.md."""

__version__ = "0.1.0"
