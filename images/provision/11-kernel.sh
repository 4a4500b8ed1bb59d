#!/usr/bin/env bash
# The kernel that drivers are built for. The base image's own may be newer, so that one goes. After this: boot into it.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "linux-image-$KERNEL_ABI=$KERNEL" "linux-headers-$KERNEL_ABI=$KERNEL"
hold_packages "linux-image-$KERNEL_ABI" "linux-headers-$KERNEL_ABI"
# The packages that stand for "the newest kernel", and all kernels but this one: the boot loader would choose the newest.
echo 'linux-base linux-base/removing-running-kernel boolean false' | debconf-set-selections
mapfile -t others < <(dpkg-query --show --showformat='${db:Status-Abbrev} ${Package}\n' 'linux-image-*' 'linux-headers-*' |
    awk -v keep="$KERNEL_ABI" '$1 == "ii" && $2 !~ keep "$" && $2 !~ /-common$/ { print $2 }')
if ((${#others[@]})); then
    apt-get -q -y purge "${others[@]}"
fi
