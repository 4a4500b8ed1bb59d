#!/usr/bin/env bash
# Higher limits for training: locked memory (RDMA), open files, socket buffers.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

put 0644 /etc/security/limits.d/spotrun.conf
put 0644 /etc/sysctl.d/60-spotrun.conf
put 0644 /etc/tmpfiles.d/spotrun.conf
