"""The GPU check: one command for everything that can be checked and measured on a real GPU.

See docs/how-to/gpu.md.
"""
