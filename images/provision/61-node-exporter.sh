#!/usr/bin/env bash
# Metrics of the machine for Prometheus, port 9100. The network lets only the cluster's own machines ask.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "prometheus-node-exporter=$NODE_EXPORTER"
systemctl enable prometheus-node-exporter.service
