"""A libcuda.so.1 that answers "no device" to every call: the driver's packages are not on pip.

Libraries that link it load with it on a machine without a GPU, and modules that ask for a device
are told that there is none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# Looked up by name at run time, so that no library lists them.
_BY_NAME = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetProcAddress_v2")
# cuMemAlloc_v2 is of the driver; cublasCreate_v2 and cuFileOpen are of other libraries.
_OF_DRIVER = re.compile(r"^ *U (cu(?!File)[A-Z]\w*)(?:@.*)?$", re.MULTILINE)


def write(folder: Path, libraries: Iterable[Path], succeed: Iterable[str] = ()) -> int:
    """Compile it into the folder, with the functions that the libraries want; returns how many.

    succeed: functions that say nothing of devices and do nothing.
    """
    listed = [
        subprocess.run(
            ["nm", "--dynamic", "--undefined-only", library],
            capture_output=True, text=True, check=True,
        ).stdout
        for library in libraries
    ]  # fmt: skip
    names = {*_BY_NAME, *_OF_DRIVER.findall("\n".join(listed))} - {*succeed}
    answers = dict.fromkeys(sorted(names), NO_DEVICE) | dict.fromkeys(succeed, 0)
    source = folder / "driver.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return {n}; }}\n" for name, n in answers.items())
    )
    out = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{out.name}", source, "-o", out], check=True
    )
    return len(names)
