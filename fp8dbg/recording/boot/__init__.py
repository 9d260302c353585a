"""The folder that ``fp8dbg run`` puts in front of PYTHONPATH; it holds one module, which Python imports by itself."""
