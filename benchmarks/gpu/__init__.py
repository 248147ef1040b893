"""Accuracy of measurements on a CUDA device, compared with torch and NVML without microtome."""
