#!/usr/bin/env bash
# Google's guest agent and OS Login, as Google's base image has them. They come from its own package source there.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"
[[ $CLOUD == gcp ]] || exit 0

install_packages google-guest-agent google-compute-engine-oslogin
# The machine makes its host key itself, and tells it to the bucket: one made anew after that would be refused.
put 0644 /etc/default/instance_configs.cfg
systemctl enable google-guest-agent.service
