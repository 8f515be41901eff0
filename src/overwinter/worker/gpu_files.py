"""The files that the executor of an NVIDIA GPU needs beside those of every worker."""

import glob

GPU = "/dev/nvidia[0-9]*"
"""The files of the GPUs."""
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", GPU)
_READ = (
    "/usr/local/nvidia",
    "/dev/nvidia-caps",
    "/sys/module/nvidia",
    "/sys/module/nvidia_uvm",
    "/sys/bus/pci/devices",
    "/sys/devices/pci*",
    "/sys/devices/system/memory",
    "/sys/devices/system/node",
)
"""Libraries of the driver that lie outside of the usual directories, and what they read of the system."""


def gpu_devices(*patterns: str) -> list[str]:
    """Return the files through which the driver is used, or those of these patterns. They are those of all GPUs,
    because the driver looks for each.
    """
    return sorted(path for pattern in patterns or _DEVICES for path in glob.glob(pattern))


def gpu_paths() -> list[str]:
    """Return all files and directories that such an executor may read by name, except /proc."""
    return [*gpu_devices(), *gpu_devices(*_READ)]
