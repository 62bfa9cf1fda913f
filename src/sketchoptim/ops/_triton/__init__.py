"""The Triton kernels of ops/gpu.py, which alone imports them: importing them needs triton."""
