"""torchvision's Python part and qwen-vl-utils in a folder, for a torch without CUDA: tests of images need no more.

PyPI's torchvision is built for CUDA. Beside a torch for CPUs its operators cannot be loaded, and its import ends with
"operator torchvision::nms does not exist", where it describes two of them that nothing has declared. Here they are
declared; whoever calls one gets torchvision's own error.
"""

import subprocess
import sys
from pathlib import Path

PACKAGES = ("torchvision==0.28.0", "qwen-vl-utils==0.0.14")  # of torch 2.13; as in requirements/gpu.txt
DECLARED = """

if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def install(folder: Path) -> None:
    """Put both packages into `folder`, which goes to PYTHONPATH.

    Raises:
        subprocess.CalledProcessError: pip does not find them, as without a connection; its output is in `stderr`.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    with (folder / "torchvision" / "extension.py").open("a") as file:
        file.write(DECLARED)
