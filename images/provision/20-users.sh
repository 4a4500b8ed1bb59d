#!/usr/bin/env bash
# The users of the services, and how an operator who has logged in asks the head: `spotrun ctl` becomes the head's user.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

getent group spotrun >/dev/null || groupadd --system spotrun
# This user has a shell and a home, because on AWS operators log in as it (EC2 Instance Connect, scripts/transports.py).
getent passwd spotrun >/dev/null ||
    useradd --system --gid spotrun --home-dir /home/spotrun --create-home --shell /bin/bash spotrun
chmod 0700 /home/spotrun
# A user only for the head. Nobody logs in as this user, so no login can read the memory of the head's processes.
getent group spotrun-head >/dev/null || groupadd --system spotrun-head
getent passwd spotrun-head >/dev/null ||
    useradd --system --gid spotrun-head --no-create-home --home-dir /var/lib/spotrun-head --shell /usr/sbin/nologin spotrun-head
# The journal has the GPUs' errors. All users may open the device nodes of GPUs and network cards, but not /dev/kmsg.
usermod --append --groups systemd-journal spotrun

# Everybody who logs in over SSH is in two groups during the session: this one, and systemd-journal, which can read the
# journal. pam_group adds both (21-ssh.sh), under any account: OS Login makes an account for each person. IAM alone
# decides who may log in.
getent group spotrun-operators >/dev/null || groupadd --system spotrun-operators
line='sshd;*;*;Al0000-2400;spotrun-operators,systemd-journal'
grep -qxF "$line" /etc/security/group.conf || echo "$line" >>/etc/security/group.conf
put 0440 /etc/sudoers.d/spotrun
visudo --check --quiet --file=/etc/sudoers.d/spotrun
put 0755 /usr/local/bin/spotrun
