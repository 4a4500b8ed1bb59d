#!/usr/bin/env bash
# Debian's packages that more than one thing here needs, and an end to updates that nobody asked for: a machine that
# trains is replaced by one of a newer image, never changed. So what the base image is behind with is made up here.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

systemctl mask apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service
put 0644 /etc/apt/apt.conf.d/99-spotrun
# If an archive does not answer, the build ends here: pinned packages could be missing from the other archives.
apt-get -q --error-on=any update
apt-get -q -y purge unattended-upgrades
# It never takes a package of another name, as a kernel of another version has; 11-kernel.sh brings the pinned one.
apt-get -q -y -o Dpkg::Options::=--force-confold upgrade
install_packages ca-certificates curl gnupg sudo openssh-server openssl bsdutils kmod udev pciutils numactl e2fsprogs mdadm \
    nftables
# torch.compile and Triton compile C when they run; DKMS compiles the GPU's driver now.
install_packages gcc g++ make libc6-dev dkms
