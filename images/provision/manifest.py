"""Print the image's manifest: what is installed, of which commit, when. Run by 90-manifest.sh in the image."""

import json
import os
import platform
import subprocess
from importlib.metadata import distributions

# What a reader looks for first; all the rest is in `packages` and `python_packages`.
NOTED = {
    "kernel": "linux-image-" + os.environ["KERNEL_ABI"],
    "nvidia_driver": "nvidia-driver-cuda",
    "nvidia_kernel_modules": "nvidia-kernel-open-dkms",
    "fabric_manager": "nvidia-fabricmanager",
    "dcgm": "datacenter-gpu-manager-4-core",
    "dcgm_exporter": "datacenter-gpu-manager-exporter",
    "node_exporter": "prometheus-node-exporter",
    "chrony": "chrony",
    "ssm_agent": "amazon-ssm-agent",
    "google_guest_agent": "google-guest-agent",
    "efa": "efa",
    "libfabric": "libfabric1-aws",
}


def main() -> None:
    packages = debian_packages()
    python = {each.metadata["Name"]: each.version for each in distributions()}
    versions = {name: packages[package] for name, package in NOTED.items() if package in packages}
    versions |= {"python": platform.python_version(), "torch": python["torch"], "spotrun": python["spotrun"]}
    ofi = [version for name, version in packages.items() if name.startswith("libnccl-ofi")]
    if ofi:
        versions |= {"aws_ofi_nccl": ofi[0], "efa_installer": os.environ["EFA_INSTALLER"]}
    manifest = {
        "cloud": os.environ["CLOUD"],
        "commit": os.environ["SPOTRUN_COMMIT"],
        "built": os.environ["SPOTRUN_BUILT"],
        "base": platform.freedesktop_os_release()["PRETTY_NAME"],
        "versions": dict(sorted(versions.items())),
        "packages": packages,
        "python_packages": dict(sorted(python.items(), key=lambda item: item[0].lower())),
    }
    print(json.dumps(manifest, indent=1))


def debian_packages() -> dict[str, str]:
    """Versions by name of what is installed."""
    form = "${db:Status-Abbrev}\t${Package}\t${Version}\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form], check=True, capture_output=True, text=True).stdout
    rows = [line.split("\t") for line in listed.splitlines()]
    return {name: version for status, name, version in rows if status.startswith("ii") or status.startswith("hi")}


main()
