"""Small stand-ins for NVIDIA's, Amazon's and GitHub's servers: files in a folder, with packages of the same names.

What the packages bring is what the provisioning looks at afterwards: versions, units, modules. So that the real ones
bring it, and that modules compile, no test here shows; a real build would end there.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.image.root import run

UNIT = """[Unit]
Description=stand-in for {name}
[Service]
ExecStart=/bin/true
[Install]
WantedBy=multi-user.target
"""
# Compiles nothing: any module of the kernel will do where one of NVIDIA's or Amazon's is looked for.
MODULE = """#!/bin/sh
set -e
for folder in /lib/modules/*; do
    mkdir -p "$folder/updates/dkms"
    cp "$(find "$folder/kernel" -name 'loop.ko*' | head -n 1)" "$folder/updates/dkms/{name}.ko"
    depmod "${{folder##*/}}"
done
"""
PIN = "Package: nvidia-* libnvidia-* firmware-nvidia-*\nPin: version {version}-*\nPin-Priority: 1001\n"
PLUGIN = "/opt/amazon/ofi-nccl/lib"
MODPROBE = "/usr/bin/nvidia-modprobe"
NEWER = "999.1"  # what apt would choose if nothing held it back


@dataclass
class Package:
    name: str
    version: str
    depends: str = ""
    files: dict[str, str] = field(default_factory=dict)
    setuid: tuple[str, ...] = ()
    postinst: str = ""


def build(package: Package, folder: Path) -> Path:
    """A .deb in the folder."""
    tree = folder / f"tree-{package.name}"
    control = tree / "DEBIAN"
    control.mkdir(parents=True)
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": "amd64",
        "Maintainer": "spotrun's tests <nobody@example.com>",
        "Description": "stand-in",
    }
    if package.depends:
        fields["Depends"] = package.depends
    (control / "control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    if package.postinst:
        (control / "postinst").write_text(package.postinst)
        (control / "postinst").chmod(0o755)
    for path, text in package.files.items():
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if not path.endswith((".service", ".pref")):
            target.chmod(0o4755 if path in package.setuid else 0o755)
    made = folder / f"{package.name}_{package.version.replace(':', '%3a')}_amd64.deb"
    run(["dpkg-deb", "--root-owner-group", "--build", str(tree), str(made)])
    shutil.rmtree(tree)
    return made


def serve(folder: Path, seen: str, pinned: dict[str, str]) -> dict[str, str]:
    """Make everything in the folder, and return what versions.env and sources.env must say instead.

    seen: where the folder is for those who download. pinned: of versions.env.
    """
    folder.mkdir()
    values = {"NVIDIA_REPOSITORY": f"file://{seen}/nvidia"}
    values["NVIDIA_KEY"] = _nvidia(folder / "nvidia", pinned)
    installer = _efa(folder, pinned)
    values |= {"EFA_INSTALLER_URL": f"file://{seen}/{installer.name}", "EFA_INSTALLER_SHA256": _sha256(installer)}
    unit = {"/lib/systemd/system/amazon-ssm-agent.service": UNIT.format(name="amazon-ssm-agent")}
    agent = build(Package("amazon-ssm-agent", pinned["SSM_AGENT"], files=unit), folder)
    values |= {"SSM_AGENT_URL": f"file://{seen}/{agent.name}", "SSM_AGENT_SHA256": _sha256(agent)}
    values["EC2_INSTANCE_CONNECT_URL"] = f"file://{seen}"
    for name in ("run", "curl", "parse"):
        script = folder / f"eic_{name}_authorized_keys"
        script.write_text("#!/bin/sh\nexit 0\n")
        values[f"EIC_{name.upper()}_SHA256"] = _sha256(script)
    return values


def _nvidia(folder: Path, pinned: dict[str, str]) -> str:
    """A signed registry; its key's fingerprint."""
    folder.mkdir()
    for package in _nvidia_packages(pinned):
        build(package, folder)
    index = ""
    for path in sorted(folder.glob("*.deb")):
        control = run(["dpkg-deb", "--field", str(path)]).stdout.strip()
        index += f"{control}\nFilename: ./{path.name}\nSize: {path.stat().st_size}\nSHA256: {_sha256(path)}\n\n"
    (folder / "Packages").write_text(index)
    (folder / "Packages.gz").write_bytes(gzip.compress(index.encode()))
    sums = [f" {_sha256(path)} {path.stat().st_size} {path.name}" for path in sorted(folder.glob("Packages*"))]
    date = run(["date", "--utc", "-R"]).stdout.strip()
    (folder / "Release").write_text("\n".join(["Origin: NVIDIA", f"Date: {date}", "SHA256:", *sums, ""]))
    home = folder / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--yes", "--pinentry-mode", "loopback", "--passphrase", ""]
    run([*gpg, "--quick-generate-key", "stand-in for NVIDIA", "ed25519", "sign", "never"])
    run([*gpg, "--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release")])
    run([*gpg, "--armor", "--output", str(folder / "3bf863cc.pub"), "--export"])
    listed = run([*gpg, "--with-colons", "--list-keys"]).stdout
    run(["gpgconf", "--homedir", str(home), "--kill", "all"])
    shutil.rmtree(home)
    found = re.search(r"^fpr:+([0-9A-F]{40}):", listed, re.MULTILINE)
    assert found, listed
    return found[1]


def _nvidia_packages(pinned: dict[str, str]) -> list[Package]:
    driver, dcgm = pinned["NVIDIA_DRIVER"], pinned["DCGM"]

    def unit(name: str) -> dict[str, str]:
        return {f"/lib/systemd/system/{name}.service": UNIT.format(name=name)}

    found = [
        Package(
            f"nvidia-driver-pinning-{driver}",
            f"{driver}-1",
            files={"/etc/apt/preferences.d/nvidia-pinning.pref": PIN.format(version=driver)},
        ),
        Package("datacenter-gpu-manager-4-core", dcgm, files=unit("nvidia-dcgm")),
        Package("datacenter-gpu-manager-4-proprietary", dcgm, f"datacenter-gpu-manager-4-core (= {dcgm})"),
        Package("datacenter-gpu-manager-4-cuda13", dcgm, f"datacenter-gpu-manager-4-core (= {dcgm})"),
        Package(
            "datacenter-gpu-manager-exporter",
            pinned["DCGM_EXPORTER"],
            "datacenter-gpu-manager-4-core",
            files=unit("nvidia-dcgm-exporter"),
        ),
    ]
    for version in (f"{driver}-1", f"{NEWER}-1"):
        found += [
            # One of Debian's contrib, as the real one's libcuda1 needs it.
            Package("nvidia-driver-cuda", version, f"nvidia-persistenced (= {version}), nvidia-support"),
            Package("nvidia-kernel-open-dkms", version, "dkms", postinst=MODULE.format(name="nvidia")),
            Package("nvidia-persistenced", version, files=unit("nvidia-persistenced")),
            Package("nvidia-modprobe", version, files={MODPROBE: "#!/bin/sh\n"}, setuid=(MODPROBE,)),
            Package(
                "firmware-nvidia-gsp",
                version,
                files={f"/lib/firmware/nvidia/{version.removesuffix('-1')}/gsp_ga10x.bin": ""},
            ),
            Package("libnvidia-cfg1", version),
            Package("nvidia-fabricmanager", version, files=unit("nvidia-fabricmanager")),
            Package("libnvidia-nscq", version),
        ]
    return found


def _efa(folder: Path, pinned: dict[str, str]) -> Path:
    """The installer's archive: it takes the options that the real one is given, and installs three packages."""
    tree = folder / "aws-efa-installer"
    tree.mkdir()
    build(Package("efa", "3.3.0-1", postinst=MODULE.format(name="efa")), tree)
    build(Package("libfabric1-aws", "2.6.0amzn1.0", files={"/opt/amazon/efa/bin/fi_info": "#!/bin/sh\n"}), tree)
    # Where the real one has them: https://github.com/aws/aws-ofi-nccl/tree/master/contrib/debian-template
    plugin = {f"{PLUGIN}/libnccl-net.so": "AWS Libfabric", "/etc/ld.so.conf.d/100_ofinccl.conf": f"{PLUGIN}\n"}
    build(Package("libnccl-ofi", f"{pinned['AWS_OFI_NCCL']}-1", files=plugin), tree)
    installer = tree / "efa_installer.sh"
    installer.write_text(
        """#!/bin/sh
set -e
[ "$*" = "-y --skip-mpi --skip-limit-conf --no-verify" ]
cd "$(dirname "$0")"
dpkg -i ./*.deb
"""
    )
    installer.chmod(0o755)
    archive = folder / "efa.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(tree, arcname=tree.name)
    shutil.rmtree(tree)
    return archive


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
