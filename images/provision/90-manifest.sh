#!/usr/bin/env bash
# The manifest /etc/spotrun/image.json: what the image really contains.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

mkdir -p /etc/spotrun
/opt/spotrun/venv/bin/python -I "$IMAGE/provision/manifest.py" >/etc/spotrun/image.json.part
chmod 0644 /etc/spotrun/image.json.part
mv /etc/spotrun/image.json.part /etc/spotrun/image.json
