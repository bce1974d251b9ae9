"""Worker of test_gpu_profile: import modules one after the other and print what fails.

    python -m tests.helpers.import_all NAME...

NAME is a module, or a package with `.*` for all its modules.  Prints a JSON object: how many were
imported, and the error of each that was not.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator


def modules_of(name: str) -> Iterator[str]:
    package = name.removesuffix(".*")
    yield package
    if package != name:
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                yield module.name


def main() -> None:
    # SGLang chooses its platform at the first use, and imports ours by its name while it does.
    _ = importlib.import_module("sglang.srt.platforms").current_platform
    names = [module for name in sys.argv[1:] for module in modules_of(name)]
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a module may also end the process
            failed[name] = f"{type(error).__name__}: {error}"[:3000]
    print(json.dumps({"imported": len(names) - len(failed), "failed": failed}))


if __name__ == "__main__":
    main()
