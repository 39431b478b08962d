"""The streaming engine: FP32 master weights and Adam state in host memory, layers streamed through the device.

Nothing in this package imports verl. Read `engine.py` from top to bottom to follow one training step.
"""
