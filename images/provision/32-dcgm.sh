#!/usr/bin/env bash
# NVIDIA's data center GPU manager and its exporter for Prometheus (port 9400), on machines with GPUs.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

packages=(datacenter-gpu-manager-4-core datacenter-gpu-manager-4-proprietary datacenter-gpu-manager-4-cuda13)
install_packages "${packages[@]/%/=$DCGM}" "datacenter-gpu-manager-exporter=$DCGM_EXPORTER"
hold_packages "${packages[@]}" datacenter-gpu-manager-exporter
for unit in nvidia-dcgm nvidia-dcgm-exporter; do
    put 0644 "/etc/systemd/system/$unit.service.d/spotrun.conf"
    systemctl enable "$unit.service"
done
