#!/usr/bin/env bash
# NVIDIA's driver for computing, with the open kernel modules, at exactly the pinned version. No CUDA toolkit:
# torch has its own.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

key=$(mktemp)
curl --fail --silent --show-error --location --retry 5 --output "$key" "$NVIDIA_REPOSITORY/3bf863cc.pub"
found=$(gpg --batch --show-keys --with-colons "$key" | awk -F: '$1 == "fpr" { print $10; exit }')
if [[ $found != "$NVIDIA_KEY" ]]; then
    echo "$NVIDIA_REPOSITORY/3bf863cc.pub: its fingerprint is ${found:-missing}, but versions.env has $NVIDIA_KEY" >&2
    exit 1
fi
gpg --batch --yes --dearmor --output /usr/share/keyrings/nvidia.gpg "$key"
chmod 0644 /usr/share/keyrings/nvidia.gpg
rm -f "$key"
echo "deb [arch=amd64 signed-by=/usr/share/keyrings/nvidia.gpg] $NVIDIA_REPOSITORY /" >/etc/apt/sources.list.d/nvidia.list

# NVIDIA's packages depend on packages in Debian's `contrib`, which the clouds' images do not list
# (https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#debian). So add it, from the mirror of `main`.
release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
# shellcheck disable=SC2016 # apt itself fills these in
format='$(REPO_URI) $(RELEASE) $(COMPONENT)'
mirror=$(apt-get indextargets --format "$format" 'Created-By: Packages' 'Origin: Debian' |
    awk -v release="$release" '$2 == release && $3 == "main" && !found++ { print $1 }')
if [[ -z $mirror ]]; then
    echo "apt has no package source of Debian $release, main: no mirror to take contrib from" >&2
    exit 1
fi
echo "deb $mirror $release contrib" >/etc/apt/sources.list.d/contrib.list
apt-get -q --error-on=any update

# This package makes apt prefer the pinned version of every part of the driver to newer versions
# (https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/).
install_packages "nvidia-driver-pinning-$NVIDIA_DRIVER"
packages=(nvidia-driver-cuda nvidia-kernel-open-dkms nvidia-persistenced)
packages+=(firmware-nvidia-gsp nvidia-modprobe libnvidia-cfg1) # the others may only recommend these
install_packages "${packages[@]}"
for package in "${packages[@]}"; do
    version=$(dpkg-query --show --showformat='${Version}' "$package")
    if [[ $version != "$NVIDIA_DRIVER"-* ]]; then
        echo "$package is of version $version, but versions.env has $NVIDIA_DRIVER" >&2
        exit 1
    fi
done
hold_packages "${packages[@]}"
# Without these checks, a missing part would show only on a machine with GPUs, which may cost 30 dollars an hour.
if ! modinfo --set-version "$KERNEL_ABI" nvidia >/dev/null; then
    echo "there is no NVIDIA module for kernel $KERNEL_ABI; see /var/lib/dkms/nvidia/*/build/make.log" >&2
    exit 1
fi
if ! compgen -G "/lib/firmware/nvidia/$NVIDIA_DRIVER/gsp_*.bin" >/dev/null; then
    echo "there is no /lib/firmware/nvidia/$NVIDIA_DRIVER/gsp_*.bin, without which the module starts no GPU" >&2
    exit 1
fi
if [[ ! -u /usr/bin/nvidia-modprobe ]]; then
    echo "/usr/bin/nvidia-modprobe is not setuid root: CUDA could not make the GPUs' device nodes" >&2
    exit 1
fi

put 0755 /usr/lib/spotrun/has-nvidia
put 0644 /etc/systemd/system/nvidia-persistenced.service.d/spotrun.conf
put 0644 /etc/modprobe.d/spotrun-nvidia.conf
systemctl enable nvidia-persistenced.service
