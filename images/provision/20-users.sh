#!/usr/bin/env bash
# Whom the services run as, and how an operator who has logged in asks the head: `spotrun ctl` becomes that user.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

getent group spotrun >/dev/null || groupadd --system spotrun
# A shell and a home of its own: on AWS operators log in as this user (EC2 Instance Connect, scripts/transports.py).
getent passwd spotrun >/dev/null ||
    useradd --system --gid spotrun --home-dir /home/spotrun --create-home --shell /bin/bash spotrun
chmod 0700 /home/spotrun
# A user only for the head. Nobody logs in as this user, so no login can read the memory of the head's processes.
getent group spotrun-head >/dev/null || groupadd --system spotrun-head
getent passwd spotrun-head >/dev/null ||
    useradd --system --gid spotrun-head --no-create-home --home-dir /var/lib/spotrun-head --shell /usr/sbin/nologin spotrun-head
# The GPUs' and the network devices' nodes are open to all; /dev/kmsg, with the GPUs' errors, is not.
usermod --append --groups systemd-journal spotrun

# Everyone who comes in over SSH is in this group for as long as the session lasts, whatever account they have: OS Login
# invents one for each. Who may come in is a matter of IAM alone. They read the journal: it is what they come for.
getent group spotrun-operators >/dev/null || groupadd --system spotrun-operators
line='sshd;*;*;Al0000-2400;spotrun-operators,systemd-journal'
grep -qxF "$line" /etc/security/group.conf || echo "$line" >>/etc/security/group.conf
put 0440 /etc/sudoers.d/spotrun
visudo --check --quiet --file=/etc/sudoers.d/spotrun
put 0755 /usr/local/bin/spotrun
