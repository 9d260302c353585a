"""A gallery of planted faults: what is wrong with a run is known, so what fp8dbg says of it can be judged.

``GALLERY`` lists them; ``record`` trains a small model with one of them and records it; ``HEALTHY`` lists runs with
nothing wrong. ``python -m examples.faults swiglu_outlier run_dir`` makes one to look at with ``fp8dbg report run_dir``.
"""

from examples.faults.gallery import GALLERY, HEALTHY, Case, Fault, record, record_healthy

__all__ = ["GALLERY", "HEALTHY", "Case", "Fault", "record", "record_healthy"]
