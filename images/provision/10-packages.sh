#!/usr/bin/env bash
# Debian packages that several steps need, and the end of automatic updates: a machine never changes, but is replaced by a
# machine of a newer image. So all pending updates of the base image are installed here.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

systemctl mask apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service
put 0644 /etc/apt/apt.conf.d/99-spotrun
# If an archive does not answer, the build ends here: pinned packages could be missing from the other archives.
apt-get -q --error-on=any update
apt-get -q -y purge unattended-upgrades
# This never installs packages of new names, such as another kernel. 11-kernel.sh installs the pinned one.
apt-get -q -y -o Dpkg::Options::=--force-confold upgrade
install_packages ca-certificates curl gnupg sudo openssh-server openssl bsdutils kmod udev pciutils numactl e2fsprogs mdadm \
    nftables
# torch.compile and Triton compile C at run time. DKMS compiles the GPU's driver now.
install_packages gcc g++ make libc6-dev dkms
