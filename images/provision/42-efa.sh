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
# No MPI; the limits are in 22-limits.sh; no verification, because the builder has no EFA device.
options=(--skip-mpi --skip-limit-conf --no-verify)
for option in "${options[@]}"; do
    if ! grep --quiet --fixed-strings --regexp="$option" "$work/aws-efa-installer/efa_installer.sh"; then
        echo "the EFA installer $EFA_INSTALLER has no option $option: see its README for the one it has now" >&2
        exit 1
    fi
done
(cd "$work/aws-efa-installer" && ./efa_installer.sh -y "${options[@]}")
if ! modinfo --set-version "$KERNEL_ABI" efa >/dev/null; then
    echo "there is no EFA module for kernel $KERNEL_ABI; see /var/lib/dkms/efa/*/build/make.log" >&2
    exit 1
fi
found=$(dpkg-query --show --showformat='${db:Status-Abbrev} ${Package} ${Version}\n' 'libnccl-ofi*' | awk '$1 == "ii" { print $2, $3 }')
read -r package version <<<"$found"
if [[ ${version:-} != "$AWS_OFI_NCCL"* ]]; then
    echo "the EFA installer brought aws-ofi-nccl ${found:-in no package}, but versions.env has $AWS_OFI_NCCL" >&2
    exit 1
fi
# NCCL looks for libnccl-net.so, and uses TCP if there is none. The installer's package for containers (libnccl-ofi-ngc-v3)
# has only libnccl-net-ofi.so. Workers get NCCL_NET (spotrun.node.network), which must be the plugin's own name.
plugin=$(dpkg-query --listfiles "$package" | sed -nE '/\/libnccl-net(-ofi)?\.so$/p' | LC_ALL=C sort | tail -n 1)
if [[ -z $plugin ]]; then
    echo "package $package has no libnccl-net.so: NCCL would not find the plugin" >&2
    exit 1
fi
if ! grep --quiet --fixed-strings 'AWS Libfabric' "$plugin"; then
    echo "$plugin does not know the name 'AWS Libfabric', which workers' NCCL_NET has" >&2
    exit 1
fi
[[ $plugin == */libnccl-net.so ]] || ln -sfn "${plugin##*/}" "${plugin%/*}/libnccl-net.so"
mkdir -p "${stamp%/*}"
echo "$EFA_INSTALLER" >"$stamp"
