#!/usr/bin/env bash
# SSH: users log in with keys that the cloud vouches for, never with keys from files. Each machine makes its own host
# key at its first boot, before anything else needs it.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

put 0644 /etc/ssh/sshd_config.d/10-spotrun.conf
put 0644 /etc/systemd/system/spotrun-host-key.service
systemctl enable ssh.service spotrun-host-key.service
# pam_group gives a session the operators' groups (20-users.sh). sshd runs the `auth` part for every kind of login.
line='auth optional pam_group.so'
grep -qxF "$line" /etc/pam.d/sshd || sed -i "1a $line" /etc/pam.d/sshd
