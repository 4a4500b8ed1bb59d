#!/usr/bin/env bash
# SSH: keys only, none from files, a host key that each machine makes itself before anything else may read it.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

put 0644 /etc/ssh/sshd_config.d/10-spotrun.conf
put 0644 /etc/systemd/system/spotrun-host-key.service
systemctl enable ssh.service spotrun-host-key.service
# Sessions get the operators' group (20-users.sh) from here; sshd runs this part whatever the way of logging in.
line='auth optional pam_group.so'
grep -qxF "$line" /etc/pam.d/sshd || sed -i "1a $line" /etc/pam.d/sshd
