"""The demo: a small language model trained on the standard library's source, with two planted faults."""
