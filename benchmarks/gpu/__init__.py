"""The GPU check: everything that can be checked and measured on a real GPU, in one command.

See docs/how-to/gpu.md.
"""
