"""The files that the executor of an NVIDIA GPU needs in addition to those of every worker."""

import glob
import os

_GPU = "/dev/nvidia[0-9]*"
_DRIVER = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_DEVICES = (*_DRIVER, _GPU)
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


def gpus() -> list[str]:
    """Return the files of the GPUs."""
    return _existing(_GPU)


def lacking_files() -> list[str]:
    """Return the files that every use of a GPU needs, and that this machine lacks."""
    return [path for path in _DRIVER if not os.path.exists(path)]


def gpu_devices() -> list[str]:
    """Return the files through which the driver is used. They are those of all GPUs, because it looks for each."""
    return _existing(*_DEVICES)


def gpu_paths() -> list[str]:
    """Return the further files and directories that the executor of a GPU may read by name, except /proc."""
    return _existing(*_DEVICES, *_READ)


def _existing(*patterns: str) -> list[str]:
    return sorted(path for pattern in patterns for path in glob.glob(pattern))
