"""The process that `harness` starts to call a function in: an attack, or what is attacked."""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict
from importlib import import_module

import psutil

from tests.remote.attack.harness import BEGUN, Tally, Target, peak_of, reset_peak


def main(given: str) -> None:
    function, args, most = json.loads(given)
    module, _, name = function.partition(":")
    call = getattr(import_module(module), name)
    rest = reset_peak(os.getpid())
    if most is not None:
        size = psutil.Process().memory_info().vms + most
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    sys.stdout.write(f"{BEGUN}\n")
    sys.stdout.flush()
    result = call(Target(*args)) if name == "attack" else call(*args)
    if isinstance(result, Tally):
        result = asdict(result)
    sys.stdout.write("\n" + json.dumps({"result": result, "peak": peak_of(os.getpid()), "rest": rest}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
