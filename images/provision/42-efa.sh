#!/usr/bin/env bash
# Elastic Fabric Adapter: its driver, built for the pinned kernel, libfabric, and NCCL's plugin for it (aws-ofi-nccl).
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"
[[ $CLOUD == aws ]] || exit 0

stamp=/opt/amazon/spotrun-efa-installer
if [[ -e $stamp && $(<$stamp) == "$EFA_INSTALLER" ]]; then
    exit 0 # 700 MB to download
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
download "$EFA_INSTALLER_URL" "$EFA_INSTALLER_SHA256" "$work/efa.tar.gz"
tar --extract --no-same-owner --file="$work/efa.tar.gz" --directory="$work"
# MPI is not used. The limits are ours (22-limits.sh). It would verify itself with a device that the builder lacks.
(cd "$work/aws-efa-installer" && ./efa_installer.sh -y --skip-mpi --skip-limit-conf --no-verify)
if ! modinfo --set-version "$KERNEL_ABI" efa >/dev/null; then
    echo "there is no EFA module for kernel $KERNEL_ABI; see /var/lib/dkms/efa/*/build/make.log" >&2
    exit 1
fi
found=$(dpkg-query --show --showformat='${db:Status-Abbrev} ${Version}\n' 'libnccl-ofi*' | awk '$1 == "ii" { print $2 }')
if [[ $found != "$AWS_OFI_NCCL"* ]]; then
    echo "the EFA installer brought aws-ofi-nccl ${found:-in no package}, but versions.env has $AWS_OFI_NCCL" >&2
    exit 1
fi
mkdir -p "${stamp%/*}"
echo "$EFA_INSTALLER" >"$stamp"
