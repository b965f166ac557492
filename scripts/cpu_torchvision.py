"""Make a published torchvision wheel load beside a torch that was built without CUDA.

The wheel's one extension module holds its CPU and its CUDA kernels together, so it asks the loader for three CUDA
libraries even where only the CPU kernels will ever run. Without them no operator is registered, `import torchvision`
ends with "operator torchvision::nms does not exist", and timm, which imports torchvision, goes down with it.

This script writes a small package of stand-ins for the three libraries into site-packages: they define exactly the
names that the wheel wants and that torch lacks. What the wheel calls while it loads answers "no device here"; every
other name prints what was called and aborts, since it can only be reached with a CUDA tensor. A `.pth` file imports
the package whenever the interpreter starts, so that worker processes and subprocesses are served too.

Run it once after installing, with the interpreter of the environment: `python scripts/cpu_torchvision.py`. It changes
nothing where torch has CUDA or where torchvision imports already, and says so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "_cuda_stand_ins"
TOOLS = ("gcc", "nm")

RUNTIME = "libcudart.so.13"  # its symbols carry the library's own name as their version
TORCH_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so")  # the first one defines what both owe

# What the extension's static initialisers call; anything else is out of reach without a CUDA tensor.
CALLED_ON_LOAD = {
    "__cudaRegisterFatBinary": "static void *handle; return &handle;",
    "__cudaRegisterFatBinaryEnd": "return 0;",
    "__cudaRegisterFunction": "return 0;",
    "__cudaRegisterVar": "return 0;",
    "__cudaUnregisterFatBinary": "return 0;",
    "__cudaInitModule": "return 0;",
    "_ZN3c104cuda12device_countEv": "return 0;",
}
VARIABLES = {"_ZN3c104cuda20CUDACachingAllocator9allocatorE"}  # c10::cuda::CUDACachingAllocator::allocator

PRELUDE = """\
#include <stdio.h>
#include <stdlib.h>

static void *refuse(const char *name) {
    fprintf(stderr, "%s was called, but this torch was built without CUDA\\n", name);
    abort();
}
"""

LOADER = '''\
"""Stand-ins for the CUDA libraries that torchvision is linked with; written by scripts/cpu_torchvision.py."""

import ctypes
import pathlib

LOADED = [ctypes.CDLL(str(library)) for library in sorted(pathlib.Path(__file__).parent.glob("*.so*"))]
'''


def run(*command: str | Path) -> str:
    """Run a command and return what it printed; a failure raises with the last line of its error text."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        complaint = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{command[0]} failed: {complaint}")
    return done.stdout


def import_error(module: str) -> str | None:
    """Import a module in a fresh interpreter and return why that failed, or None if it did not."""
    try:
        run(sys.executable, "-c", f"import {module}")
    except RuntimeError as error:
        return str(error)
    return None


def defined(library: Path) -> set[str]:
    """The names a shared library offers, without versions."""
    return {line.split()[-1].partition("@")[0] for line in run("nm", "-D", "--defined-only", library).splitlines()}


def wanted(library: Path) -> set[str]:
    """The names a shared library cannot load without, versions kept (weak ones are optional, so left out)."""
    rows = (line.split() for line in run("nm", "-D", "--undefined-only", library).splitlines())
    return {name for kind, name in rows if kind == "U"}


def missing(torch_folder: Path, vision_folder: Path) -> dict[str, set[str]]:
    """The names torchvision wants and nobody has, by the stand-in library that will define them."""
    have = set[str]().union(*(defined(path) for path in (torch_folder / "lib").glob("lib*.so")))
    want = set[str]().union(*(wanted(path) for path in vision_folder.glob("*.so")))
    runtime = {name for name, _, version in (entry.partition("@") for entry in want) if version == RUNTIME}
    unversioned = {name for name in want if "@" not in name and "cuda" in name.lower()}
    first, *others = TORCH_LIBRARIES
    return {RUNTIME: runtime, first: unversioned - have} | {name: set() for name in others}


def c_source(names: set[str]) -> str:
    """The C text of a library that defines the given names."""
    lines = [PRELUDE]
    for name in sorted(names):
        if name in VARIABLES:
            lines.append(f"void *{name};")
        else:
            body = CALLED_ON_LOAD.get(name, f'return refuse("{name}");')
            lines.append(f"void *{name}() {{ {body} }}")
    return "\n".join(lines) + "\n"


def compile_library(name: str, symbols: set[str], folder: Path) -> None:
    """Compile one stand-in into a folder, giving the CUDA runtime's symbols the version they are asked for with."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, versions, result = (Path(scratch) / part for part in ("stand_in.c", "versions", name))
        source.write_text(c_source(symbols))
        options = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{name}"]
        if name == RUNTIME:
            versions.write_text(f"{RUNTIME} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script={versions}")
        run("gcc", *options, "-o", result, source)
        os.replace(result, folder / name)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)


def install(torch_folder: Path, vision_folder: Path) -> int:
    """Write the package of stand-ins beside torch, have every interpreter import it, and count the names it defines."""
    site = torch_folder.parent
    package = site / PACKAGE
    package.mkdir(exist_ok=True)
    libraries = missing(torch_folder, vision_folder)
    for name, symbols in libraries.items():
        compile_library(name, symbols, package)
    write(package / "__init__.py", LOADER)
    write(site / f"{PACKAGE}.pth", f"import {PACKAGE}\n")  # last: nothing may be loaded before it is all there
    return sum(map(len, libraries.values()))


def folder_of(module: str) -> Path | None:
    """Where a package is installed, or None if it is not; it is not imported."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).parent if spec and spec.origin else None


def main() -> str:
    """Repair the environment if it needs it, and return one sentence on what was done."""
    torch_folder, vision_folder = folder_of("torch"), folder_of("torchvision")
    if torch_folder is None or vision_folder is None:
        return "torchvision: nothing to do, torch and torchvision are not both installed."
    if any((torch_folder / "lib" / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip")):
        return "torchvision: nothing to do, this torch is built for a GPU."
    if import_error("torchvision") is None:
        return "torchvision: nothing to do, it imports as it is."
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise RuntimeError(f"the repair needs {' and '.join(absent)}: install a C compiler and run this again")
    count = install(torch_folder, vision_folder)
    if reason := import_error("torchvision"):
        raise RuntimeError(f"it still does not import after the repair ({reason})")
    return f"torchvision: repaired for a CPU-only torch, {count} CUDA names stood in for."


if __name__ == "__main__":
    try:
        print(main())
    except RuntimeError as error:
        sys.exit(f"torchvision: {error}.")
