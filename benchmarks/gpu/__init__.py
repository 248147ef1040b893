"""How right the measured values are on a CUDA device, against what torch and NVML say without microtome."""
