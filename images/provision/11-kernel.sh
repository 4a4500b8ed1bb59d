#!/usr/bin/env bash
# The kernel that drivers are built for. The base image's may be newer, so it is removed. Boot the kernel after this step.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "linux-image-$KERNEL_ABI=$KERNEL" "linux-headers-$KERNEL_ABI=$KERNEL"
hold_packages "linux-image-$KERNEL_ABI" "linux-headers-$KERNEL_ABI"
# Remove the packages for "the newest kernel", and all other kernels: the boot loader would choose the newest.
echo 'linux-base linux-base/removing-running-kernel boolean false' | debconf-set-selections
mapfile -t others < <(dpkg-query --show --showformat='${db:Status-Abbrev} ${Package}\n' 'linux-image-*' 'linux-headers-*' |
    awk -v keep="$KERNEL_ABI" '$1 == "ii" && $2 !~ keep "$" && $2 !~ /-common$/ { print $2 }')
if ((${#others[@]})); then
    apt-get -q -y purge "${others[@]}"
fi
