"""Mamba-2's two operations over a sequence, the convolution and the scan, and the kernels that they run on."""
