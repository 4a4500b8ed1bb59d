#!/usr/bin/env bash
# The users of the services, and how an operator who has logged in asks the head: `spotrun ctl` becomes the head's user.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

getent group spotrun >/dev/null || groupadd --system spotrun
# It has a shell and a home: on AWS operators log in as this user (EC2 Instance Connect, scripts/transports.py).
getent passwd spotrun >/dev/null ||
    useradd --system --gid spotrun --home-dir /home/spotrun --create-home --shell /bin/bash spotrun
chmod 0700 /home/spotrun
# A user only for the head. Nobody logs in as this user, so no login can read the memory of the head's processes.
getent group spotrun-head >/dev/null || groupadd --system spotrun-head
getent passwd spotrun-head >/dev/null ||
    useradd --system --gid spotrun-head --no-create-home --home-dir /var/lib/spotrun-head --shell /usr/sbin/nologin spotrun-head
# Everybody may open the device nodes of GPUs and network cards, but not /dev/kmsg, which has the GPUs' errors.
usermod --append --groups systemd-journal spotrun

# Everybody who logs in over SSH is in this group during the session, under any account: OS Login makes one for each
# person. IAM alone decides who may log in. The group can read the journal.
getent group spotrun-operators >/dev/null || groupadd --system spotrun-operators
line='sshd;*;*;Al0000-2400;spotrun-operators,systemd-journal'
grep -qxF "$line" /etc/security/group.conf || echo "$line" >>/etc/security/group.conf
put 0440 /etc/sudoers.d/spotrun
visudo --check --quiet --file=/etc/sudoers.d/spotrun
put 0755 /usr/local/bin/spotrun
