"""Record the outputs of a model's blocks over a data set, on every worker of a Ray cluster.

Run it as it is: it starts Ray on this machine. On a cluster, pass its address to `ray.init`, and as `to` a folder that
all nodes share.
"""

import tempfile

import numpy as np
import ray

import microtome as mt
from microtome.scale.ray import extract, record

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)

# 256 images of random values. Read yours with ray.data.read_images, read_parquet, …
images = np.random.default_rng(0).standard_normal((256, 3, 32, 32), dtype=np.float32)
dataset = ray.data.from_numpy(images)

with tempfile.TemporaryDirectory() as folder:
    # Each worker builds the model by its name; a module works, too. It runs on batches of 32 rows, whatever the blocks
    # of the data set, and the mean over positions of each output is written.
    recording = record(
        dataset,
        "zoo:tiny-vit",
        "blocks.*",
        to=f"{folder}/acts",
        reduce="mean",
        progress=lambda totals: print(f"{totals.runs} batches, {totals.nbytes} bytes"),
    )
    print(recording["blocks.1"].cat().shape, recording.ids("blocks.1")[:4])
    print(f"mean {recording.stats('blocks.1').mean:.4f}, std {recording.stats('blocks.1').std:.4f}")

    # The folder can be read anywhere, and several as one: mt.load([monday, tuesday]).
    assert mt.load(f"{folder}/acts").names == recording.names

# The same as a stage of a Ray Data pipeline: each row gets a column for each address.
features = extract(dataset, "zoo:tiny-vit", ["blocks.1"], reduce="mean", workers=1)
print(features.take_batch(4)["blocks.1"].shape)

ray.shutdown()
