#!/usr/bin/env bash
# The agent and the head: each machine runs the one that its metadata name. The scratch disk comes before them.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

for program in role scratch await-end fence; do
    put 0755 "/usr/lib/spotrun/$program"
done
put 0644 /etc/systemd/system/spotrun-role.service
for unit in spotrun-agent spotrun-head spotrun-scratch; do
    put 0644 "/etc/systemd/system/$unit.service"
    systemctl enable "$unit.service"
done
