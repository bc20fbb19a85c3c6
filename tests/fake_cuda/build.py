"""Compiles the C++ of this folder once for the installed torch; needs a C++ compiler and Python's headers."""

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent


def built(name: str, *flags: str) -> Path:
    """Return the library of `name`.cpp, without importing torch."""
    spec = find_spec("torch")
    assert spec is not None
    torch = Path(next(iter(spec.submodule_search_locations or ())))
    source = FOLDER / f"{name}.cpp"
    of = hashlib.sha256(source.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:12]
    library = Path(sys.prefix, "fake-cuda", f"{name}-{of}.so")
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", str(source), "-o", str(made), *flags]
        command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"], check=True)
        made.rename(library)
    return library
