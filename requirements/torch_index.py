"""Print the pip option that finds the CPU build of torch, or nothing where it is not needed or not reachable.

On Linux x86-64 the default registry's torch is a CUDA build of several gigabytes; the demo and the tests need the
200 MB CPU build. Nothing is printed where pip is configured with an index of its own (that choice is the user's), on
other platforms (there the default is small), or where the index does not answer within three seconds.
"""

import contextlib
import os
import platform
import subprocess
import sys
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"


def pip_is_configured() -> bool:
    if any(name in os.environ for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")):
        return True
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return any(word in listed for word in ("index", "find-links"))


if sys.platform == "linux" and platform.machine() == "x86_64" and not pip_is_configured():
    with contextlib.suppress(OSError), urllib.request.urlopen(INDEX + "/torch/", timeout=3):
        print(f"--extra-index-url {INDEX}")
