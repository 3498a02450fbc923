"""Triton kernels for a decoding step on a GPU, one idea a file, each beside its PyTorch reference.

Their modules import triton, which only builds of PyTorch for GPUs bring along: import them where
`switch.kernels_used` says so, not before.
"""
