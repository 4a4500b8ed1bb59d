#!/usr/bin/env bash
# The fabric manager connects the GPUs of machines with NVSwitch, and starts only on those. Its version must be the
# driver's.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "nvidia-fabricmanager=$NVIDIA_DRIVER-1" "libnvidia-nscq=$NVIDIA_DRIVER-1"
hold_packages nvidia-fabricmanager libnvidia-nscq
put 0644 /etc/systemd/system/nvidia-fabricmanager.service.d/spotrun.conf
systemctl enable nvidia-fabricmanager.service
