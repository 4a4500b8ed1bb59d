#!/usr/bin/env bash
# Removes everything of the builder and of the operator: keys, identity, logs, caches, boot state. The shutdown after this
# still writes a little: a random seed, which no machine counts as randomness (systemd-random-seed.service(8)), chrony's
# drift, and the last lines of the journal.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

rm -f /etc/ssh/ssh_host_*
# sshd does not read these files (sshd_config.d). They are removed anyway; Packer's own key is among them.
find /root /home -xdev -path '*/.ssh/*' -type f -delete
find /root /home -xdev \( -name .bash_history -o -name .python_history -o -name .wget-hsts \) -delete
rm -rf /root/.gnupg
# OS Login: the operator's account and its right to use sudo. Its home belongs to no account of the system.
rm -rf /etc/oslogin_passwd.cache* /etc/oslogin_group.cache* /etc/google_instance_id
for folder in /var/google-sudoers.d /var/google-users.d; do
    [[ ! -d $folder ]] || find "$folder" -type f ! -name README -delete
done
for home in /home/*/; do
    awk -F: -v name="$(basename "$home")" '$1 == name { found = 1 } END { exit !found }' /etc/passwd ||
        rm -rf --one-file-system "$home"
done
truncate --size=0 /etc/machine-id # empty, not missing: systemd then makes one at the next boot
rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed /var/lib/systemd/credential.secret
rm -rf /var/lib/cloud/* /run/cloud-init /var/lib/google/* /var/lib/dhcp/* /var/lib/chrony/*
# Packer's own session lives in the SSM agent's folder, and Packer must learn how this script ends.
if [[ -d /run/systemd/system ]]; then
    put 0644 /run/systemd/system/spotrun-forget.service
    systemctl daemon-reload
    systemctl start spotrun-forget.service
else
    rm -rf /var/lib/amazon/ssm/*
fi
apt-get -q clean
rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /root/.cache /home/*/.cache
find /var/log -xdev -type f -delete
rm -rf /var/log/journal/*
find /tmp /var/tmp -xdev -mindepth 1 -maxdepth 1 ! -path "$IMAGE" -exec rm -rf --one-file-system {} +
sync
