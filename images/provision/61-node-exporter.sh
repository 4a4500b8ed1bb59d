#!/usr/bin/env bash
# Metrics of the machine for Prometheus, port 9100. The network lets only nodes ask nodes.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "prometheus-node-exporter=$NODE_EXPORTER"
hold_packages prometheus-node-exporter
systemctl enable prometheus-node-exporter.service
