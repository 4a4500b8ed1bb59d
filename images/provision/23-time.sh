#!/usr/bin/env bash
# The cloud's own clock, through chrony.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "chrony=$CHRONY"
hold_packages chrony
put 0644 "/etc/chrony/sources.d/$CLOUD.sources"
# Debian's pool is on the internet, which a cluster may not reach.
sed -i 's/^pool /# &/' /etc/chrony/chrony.conf
systemctl enable chrony.service
