#!/usr/bin/env bash
# What the image holds, as it is and not as it was meant to be: /etc/spotrun/image.json.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

mkdir -p /etc/spotrun
/opt/spotrun/venv/bin/python -I "$IMAGE/provision/manifest.py" >/etc/spotrun/image.json.part
chmod 0644 /etc/spotrun/image.json.part
mv /etc/spotrun/image.json.part /etc/spotrun/image.json
