#!/usr/bin/env bash
# NCCL's plugin for EFA loads libcudart.so by that name (nccl_net_ofi_gpu_init in its src/nccl_ofi_cuda.cpp). If there is
# none, NCCL uses TCP, without an error. torch's packages have only libcudart.so.13. So this puts a link beside the plugin,
# in a folder that the linker searches.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"
# A torch without CUDA, as in tests, does not need the plugin.
[[ $CLOUD == aws && -n $TORCH_CUDA ]] || exit 0

python=/opt/spotrun/venv/bin/python
mapfile -t found < <(find /opt/spotrun/venv -name "libcudart.so.${TORCH_CUDA%%.*}")
if ((${#found[@]} != 1)); then
    echo "torch brought ${#found[@]} files libcudart.so.${TORCH_CUDA%%.*} into /opt/spotrun/venv, not one: ${found[*]}" >&2
    exit 1
fi
mapfile -t packages < <(dpkg-query --show --showformat='${db:Status-Abbrev} ${Package}\n' 'libnccl-ofi*' |
    awk '$1 == "ii" { print $2 }')
mapfile -t folders < <(dpkg-query --listfiles "${packages[@]}" | sed -n 's,/libnccl-net[^/]*\.so$,,p' | sort -u)
if ((${#folders[@]} != 1)); then
    echo "${packages[*]}: libnccl-net*.so is in ${#folders[@]} folders, not in one: ${folders[*]}" >&2
    exit 1
fi
ln -sfn "${found[0]}" "${folders[0]}/libcudart.so"
ldconfig
if ! "$python" -I -c 'import ctypes; ctypes.CDLL("libcudart.so").cudaRuntimeGetVersion'; then
    echo "${folders[0]}/libcudart.so is not what a program gets that asks for libcudart.so" >&2
    exit 1
fi
