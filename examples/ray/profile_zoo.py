"""Profile many models, each in a task of a Ray cluster, and print their totals as a table.

Run it as it is: it starts Ray on this machine. On a cluster, pass its address to `ray.init` instead.
"""

import ray

from microtome.scale.ray import profile

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)

# Names of any source: torchvision:resnet50, timm:vit_base_patch16_224, hf:bert, your.package:Net. The last name is
# wrong: the table says why, and the others are not affected.
profiles = profile(["zoo:tiny-resnet", "zoo:tiny-vit", "zoo:tiny-unet", "zoo:tiny-vti"])
print(profiles)

for row in profiles["zoo:tiny-resnet"].top(2, by="macs"):
    print(row)

ray.shutdown()
