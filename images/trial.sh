#!/usr/bin/env bash
# Run provisioning steps in a plain Debian, as root: trial.sh IMAGES CLOUD FIRST LAST. For `make image-trial` (trial.py), or
# for any Debian 12 that you can throw away.
set -euo pipefail
images=${1:?folder images} cloud=${2:?gcp or aws} first=${3:?first number} last=${4:?last number}

export DEBIAN_FRONTEND=noninteractive
apt-get -q update
# What the clouds' base images have and the smallest Debian lacks. tests/image/root.py has the same list.
apt-get -q -y --no-install-recommends install systemd systemd-sysv dbus libpam-systemd udev openssh-server sudo \
    ca-certificates gpgv
mkdir -p /tmp/image
cp -r "$images/provision" "$images/root" "$images/versions.env" "$images/sources.env" /tmp/image/
IMAGE=/tmp/image CLOUD=$cloud bash /tmp/image/provision/run.sh "$first" "$last"
