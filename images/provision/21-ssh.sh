#!/usr/bin/env bash
# SSH: only keys, none from files. Each machine makes its own host key, before anything else can read one.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

put 0644 /etc/ssh/sshd_config.d/10-spotrun.conf
put 0644 /etc/systemd/system/spotrun-host-key.service
systemctl enable ssh.service spotrun-host-key.service
# Sessions get the operators' group (20-users.sh) here; sshd runs this part for every kind of login.
line='auth optional pam_group.so'
grep -qxF "$line" /etc/pam.d/sshd || sed -i "1a $line" /etc/pam.d/sshd
