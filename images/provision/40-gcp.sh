#!/usr/bin/env bash
# Google's guest agent and OS Login are in Google's base image, with their package source.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"
[[ $CLOUD == gcp ]] || exit 0

install_packages google-guest-agent google-compute-engine-oslogin
# The machine makes its own host key and publishes it in the bucket. A key made after that would be refused.
put 0644 /etc/default/instance_configs.cfg
# Since version 20250901, the agent has a manager in a unit of its own. Google's base image chooses between the units.
if ! systemctl is-enabled --quiet google-guest-agent-manager.service &&
    ! systemctl is-enabled --quiet google-guest-agent.service; then
    systemctl enable google-guest-agent.service
fi
