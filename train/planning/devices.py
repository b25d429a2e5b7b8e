"""GPUs by name: peaks and memory from data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIGA, TERA = 1e9, 1e12
OTHER_DEVICES = {"mig", "laptop", "d", "max"}
"""Words in a driver's name for a part or a slower variant of a device: a multi-instance
slice, a laptop GPU, the RTX 4090 D, Max-Q.
"""


class UnknownDeviceError(ValueError):
    """A device name that the table lacks."""


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
        name: common name, with words of the driver's name.
        flops: dense bfloat16 operations per second, accumulated in float32, without
            sparsity.
        memory: bytes.
        link: bytes per second and direction to the other GPUs of its machine (NVLink,
            Infinity Fabric or PCIe).
    """

    name: str
    flops: float
    memory: float
    link: float


def _device(
    name: str, teraflops: float, gigabytes: float, link_gigabytes: float
) -> Device:
    return Device(name, teraflops * TERA, gigabytes * GIGA, link_gigabytes * GIGA)


DEVICES = (
    # NVIDIA GB200 NVL72 data sheet, 2024: 360 PFLOPS sparse and 13.4 TB over 72
    _device("GB200", 2500, 186, 900),
    # NVIDIA HGX B200 data sheet, 2025: 4.5 PFLOPS sparse
    _device("B200", 2250, 180, 900),
    _device("GH200", 989, 96, 450),  # NVIDIA GH200 data sheet, 2023: 1,979 sparse
    _device("H200 NVL", 836, 141, 450),  # NVIDIA H200 data sheet, 2024: 1,671 sparse
    _device("H200", 989, 141, 450),  # the same: 1,979 sparse
    _device("H100 NVL", 835, 94, 300),  # NVIDIA H100 data sheet, 2024: 1,671 sparse
    # NVIDIA H100 PCIe product brief, 2022: 1,513 sparse
    _device("H100 PCIe", 756, 80, 300),
    _device("H100", 989, 80, 450),  # NVIDIA H100 data sheet, 2024: 1,979 sparse
    _device("A100-SXM4-40GB", 312, 40, 300),  # NVIDIA A100 data sheet, 2021
    _device("A100-PCIE-40GB", 312, 40, 32),  # the same
    _device("A100", 312, 80, 300),  # the same
    _device("A10", 125, 24, 32),  # NVIDIA A10 data sheet, 2021: 250 sparse
    _device("L40S", 362, 48, 32),  # NVIDIA L40S data sheet, 2023: 733 sparse
    _device("L40", 181, 48, 32),  # NVIDIA L40 data sheet, 2022: 362 sparse
    _device("L4", 121, 24, 32),  # NVIDIA L4 data sheet, 2023: 242 sparse
    _device("RTX 4090", 165, 24, 32),  # NVIDIA Ada architecture white paper, appendix A
    _device("MI300X", 1307, 192, 448),  # AMD MI300X data sheet, 2023
)
"""The first device whose name occurs in the driver's name, in full words, matches:
longer names precede shorter ones.
"""


def find_device(name: str) -> Device | None:
    """Device for a name as written by people or drivers; None if the table lacks it."""
    words = _words(name)
    for device in DEVICES:
        if "".join(_words(device.name)) == "".join(words):
            return device
    if OTHER_DEVICES & set(words):
        return None
    for device in DEVICES:
        part = _words(device.name)
        starts = range(len(words))
        if any(words[start : start + len(part)] == part for start in starts):
            return device
    return None


def named_device(name: str) -> Device:
    """`find_device`, but unknown names are an error.

    Raises:
        UnknownDeviceError: the name is unknown; the message lists the known ones.
    """
    if (device := find_device(name)) is None:
        names = ", ".join(device.name for device in DEVICES)
        raise UnknownDeviceError(
            f"no GPU called {name!r} is known; known are {names}; for another one "
            "give --peak-tflops and --memory-gb"
        )
    return device


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.lower())
