"""Run the tail of a model on a Ray cluster, and its head here.

    python examples/ray/serve_tail.py                       # starts a cluster on this machine
    RAY_ADDRESS=auto python examples/ray/serve_tail.py      # joins that of this machine, from `ray start`

Needs `pip install 'microtome[ray]'`, on every node.
"""

from __future__ import annotations

import logging
import os
import sys

import ray
import torch

import microtome as mt
from microtome import zoo
from microtome.scale.ray import deploy

CUT = "layer1"


def main() -> None:
    # The processes of a cluster on this machine find the packages that this one finds; a cluster of `ray start` has its
    # own. The sizes are those of an example: without them, Ray takes all cores and a third of the memory.
    address = os.environ.get("RAY_ADDRESS", "local")
    is_new = address == "local"
    size = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False} if is_new else {}
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"} if is_new else {}
    ray.init(address, runtime_env={"env_vars": variables}, log_to_driver=False, logging_level=logging.ERROR, **size)

    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model, x, at=CUT)  # verified: the stages compute what the model computes
    images = [torch.randn_like(x) for _ in range(32)]

    # Two replicas of the tail, each with its weights only. They compute up to 8 requests together if they may.
    with deploy(stages, only=[CUT], replicas=2, num_cpus=0.5, batch=8, listen="127.0.0.1:0") as deployment:
        print(deployment)
        with torch.no_grad(), mt.connect(model, x, deployment.address, at=CUT, fallback=None) as remote:
            print("one request is bit-equal:", remote(x).equal(model(x)))
            outputs = list(remote.stream(images, window=16))
            close = all(torch.allclose(y, model(image), atol=1e-5) for y, image in zip(outputs, images, strict=True))
            print(f"{len(outputs)} requests in batches agree:", close)

        # Inside the cluster, without gRPC: a boundary of the head in, the output of the model out.
        with torch.no_grad():
            print("by the handle, bit-equal:", deployment.handle(stages[0](x)).equal(model(x)))

    ray.serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
