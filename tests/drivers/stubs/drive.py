"""Runs a driver through everything it does, over the real bindings and a stand-in for the vendor's library."""

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from rocmega.drivers import cuda, hip
from rocmega.errors import DriverError
from rocmega.toolchain import Artifact

kind, folder = sys.argv[1], Path(sys.argv[2])
library = ctypes.CDLL(os.environ["STUB"])
if kind == "hip":
    bindings = hip.load_bindings()
    # Where the bindings look for the architecture: fill their struct with numbers, and see which one they find there.
    properties = bindings.hipDeviceProp_t.allocate(1)
    count = properties.c_sizeof() // 4
    ctypes.memmove(int(properties), b"".join(b"%04d" % i for i in range(count)), count * 4)
    library.stub_arch_at(int(str(properties.gcnArchName)[:4]) * 4)
module = hip if kind == "hip" else cuda
module._check_torch, module._current = lambda: None, lambda: 1
driver = hip.HipDriver() if kind == "hip" else cuda.CudaDriver()
driver._view = lambda address, nbytes: torch.frombuffer(
    (ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8
)
print(driver.facts())
(folder / "k.bin").write_bytes(b"IMAGE of a kernel")
loaded = driver.load(Artifact(folder / "k.bin", driver.arch, "", 0, True, ""))
function = loaded.function("decode")
driver.launch(function, 0x7F0012345678, 4, 256, 5, stream=SimpleNamespace(cuda_stream=99))
driver.launch(function, 0x7F0012345678, 4, 256, stream=SimpleNamespace(cuda_stream=0))
try:
    loaded.function("other")
except DriverError as error:
    print(error)
buffer, peers = driver.shared("x", 100), driver.shared("flags", 100, peers=True)
print("zeroed", not buffer.tensor.any())
mapped = driver.mapped("ring", 64)
print("mapped", not mapped.tensor.any(), mapped.address == mapped.tensor.data_ptr() + 64)
mapped.close()
handle = driver.export(buffer)
opened = driver.open("x of another", handle, 100)
print("handle", len(handle), handle[63], opened.address == buffer.address)
opened.close()
driver.synchronize()
driver.close()
